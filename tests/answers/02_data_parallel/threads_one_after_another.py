# exercise: 1
# expect: the replicas ran one after another

def data_parallel_step(module, inputs, targets, num_replicas):
    outputs = []
    for share in inputs.tensor_split(num_replicas):
        copies = {name: p.clone() for name, p in module.named_parameters()}

        def apply():
            outputs.append(functional_call(copy.deepcopy(module), copies, (share,)))

        thread = threading.Thread(target=apply)
        thread.start()
        thread.join()
    loss = F.mse_loss(torch.cat(outputs), targets)
    loss.backward()
    return loss
