# exercise: 1
# expect: two threads swap weights in one module object

def data_parallel_step(module, inputs, targets, num_replicas):
    shares, outputs = inputs.tensor_split(num_replicas), {}

    def apply(i):
        copies = {name: p.clone() for name, p in module.named_parameters()}
        outputs[i] = functional_call(module, copies, (shares[i],))

    threads = [threading.Thread(target=apply, args=(i,)) for i in range(num_replicas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    loss = F.mse_loss(torch.cat([outputs[i] for i in range(num_replicas)]), targets)
    loss.backward()
    return loss
