# exercise: 1
# expect: this is the mean of the replicas' means

def data_parallel_step(module, inputs, targets, num_replicas):
    shares = list(zip(inputs.tensor_split(num_replicas), targets.tensor_split(num_replicas)))
    copies = [{name: p.clone() for name, p in module.named_parameters()} for _ in shares]
    networks = [copy.deepcopy(module) for _ in shares]
    losses = [None] * num_replicas

    def apply(i):
        x, y = shares[i]
        losses[i] = F.mse_loss(functional_call(networks[i], copies[i], (x,)), y)

    threads = [threading.Thread(target=apply, args=(i,)) for i in range(num_replicas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss
