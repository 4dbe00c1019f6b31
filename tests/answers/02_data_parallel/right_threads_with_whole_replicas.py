# exercise: 1
# expect: pass

def data_parallel_step(module, inputs, targets, num_replicas):
    shares = inputs.chunk(num_replicas)
    replicas = [module] + [copy.deepcopy(module) for _ in shares[1:]]
    outputs = {}

    def apply(i):
        outputs[i] = replicas[i](shares[i])

    threads = [threading.Thread(target=apply, args=(i,)) for i in range(len(shares))]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    loss = F.mse_loss(torch.cat([outputs[i] for i in range(len(shares))]), targets)
    loss.backward()
    for replica in replicas[1:]:
        for p, q in zip(module.parameters(), replica.parameters()):
            p.grad += q.grad
    return loss.item()
