# exercise: 1
# expect: pass

from concurrent.futures import ThreadPoolExecutor


def data_parallel_step(module, inputs, targets, num_replicas):
    def apply(share):
        copies = {name: p + 0 for name, p in module.named_parameters()}
        return functional_call(copy.deepcopy(module), copies, (share,))

    with ThreadPoolExecutor(num_replicas) as pool:
        outputs = list(pool.map(apply, inputs.tensor_split(num_replicas)))
    loss = F.mse_loss(torch.cat(outputs), targets)
    loss.backward()
    return loss.detach()
