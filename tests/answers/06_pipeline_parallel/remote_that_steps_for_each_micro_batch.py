# exercise: 5
# expect: does the optimizer step once, for the whole batch

def remote_forward(stages, inputs, num_micro_batches):
    logits = []
    for x in inputs.tensor_split(num_micro_batches):
        x_rref = rpc.RRef(x)
        for stage in stages[:-1]:
            x_rref = stage.remote().forward(x_rref)
        logits.append(stages[-1].rpc_async().forward(x_rref))
    return torch.cat([future.wait() for future in logits])


def remote_train(stages, batches, num_micro_batches, learning_rate):
    parameters = [p for stage in stages
                  for p in stage.rpc_sync().parameter_rrefs()]
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters,
                                     lr=learning_rate)
    losses = []
    for inputs, targets in batches:
        total = 0
        for x, y in zip(inputs.tensor_split(num_micro_batches), targets.tensor_split(num_micro_batches)):
            with dist_autograd.context() as context_id:
                loss = GPT.loss(remote_forward(stages, x, 1), y)
                dist_autograd.backward(context_id, [loss])
                optimizer.step(context_id)
            total += loss.item() * len(x) / len(inputs)
        losses.append(total)
    return losses
