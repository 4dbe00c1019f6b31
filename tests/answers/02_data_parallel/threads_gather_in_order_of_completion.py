# exercise: 1
# expect: does output i meet target i?

def data_parallel_step(module, inputs, targets, num_replicas):
    shares = inputs.tensor_split(num_replicas)
    outputs = []

    def apply(share):
        copies = {name: p.clone() for name, p in module.named_parameters()}
        outputs.append(functional_call(copy.deepcopy(module), copies, (share,)))

    threads = [threading.Thread(target=apply, args=(share,)) for share in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    loss = F.mse_loss(torch.cat(outputs), targets)
    loss.backward()
    return loss
