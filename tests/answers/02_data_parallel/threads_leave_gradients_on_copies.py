# exercise: 1
# expect: are they on the copies

def data_parallel_step(module, inputs, targets, num_replicas):
    shares = inputs.chunk(num_replicas)
    replicas = [copy.deepcopy(module) for _ in shares]
    outputs = {}

    def apply(i):
        outputs[i] = replicas[i](shares[i])

    threads = [threading.Thread(target=apply, args=(i,)) for i in range(num_replicas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    loss = F.mse_loss(torch.cat([outputs[i] for i in range(num_replicas)]), targets)
    loss.backward()
    return loss
