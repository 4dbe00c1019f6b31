# exercise: 1
# expect: the loss that you return must be a number, not NoneType

def data_parallel_step(module, inputs, targets, num_replicas):
    shares = inputs.tensor_split(num_replicas)
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
    F.mse_loss(torch.cat(outputs), targets).backward()
