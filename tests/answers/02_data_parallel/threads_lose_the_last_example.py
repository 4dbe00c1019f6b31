# exercise: 1
# expect: example 9 of 0 to 9 went to no replica

def data_parallel_step(module, inputs, targets, num_replicas):
    size = len(inputs) // num_replicas
    shares = [inputs[i * size:(i + 1) * size] for i in range(num_replicas)]
    copies = [{name: p.clone() for name, p in module.named_parameters()} for _ in shares]
    networks = [copy.deepcopy(module) for _ in shares]
    outputs = [None] * num_replicas

    def apply(i):
        outputs[i] = functional_call(networks[i], copies[i], (shares[i],))

    threads = [threading.Thread(target=apply, args=(i,)) for i in range(num_replicas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    loss = F.mse_loss(torch.cat(outputs), targets[:size * num_replicas])
    loss.backward()
    return loss
