# exercise: 1
# expect: two replicas used the same weights

def data_parallel_step(module, inputs, targets, num_replicas):
    shares, outputs = inputs.tensor_split(num_replicas), {}

    def apply(i):
        outputs[i] = module(shares[i])

    threads = [threading.Thread(target=apply, args=(i,)) for i in range(num_replicas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    loss = F.mse_loss(torch.cat([outputs[i] for i in range(num_replicas)]), targets)
    loss.backward()
    return loss
