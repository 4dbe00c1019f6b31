# exercise: 1
# expect: the gradient is divided by the number of replicas

def data_parallel_step(module, inputs, targets, num_replicas):
    shares = inputs.tensor_split(num_replicas)
    replicas = [copy.deepcopy(module) for _ in shares]
    outputs = [None] * num_replicas

    def apply(i):
        outputs[i] = replicas[i](shares[i])

    threads = [threading.Thread(target=apply, args=(i,)) for i in range(num_replicas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    loss = F.mse_loss(torch.cat(outputs), targets)
    loss.backward()
    for p, *copies in zip(module.parameters(), *[r.parameters() for r in replicas]):
        p.grad = torch.stack([c.grad for c in copies]).mean(dim=0)
    return loss
