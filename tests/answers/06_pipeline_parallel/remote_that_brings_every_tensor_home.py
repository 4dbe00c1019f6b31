# exercise: 5
# expect: stage 1 fetches an input from the driver, not from stage 0

def remote_forward(stages, inputs, num_micro_batches):
    x_rrefs = [rpc.RRef(x) for x in inputs.tensor_split(num_micro_batches)]
    for stage in stages:
        x_rrefs = [rpc.RRef(stage.rpc_sync().forward(x_rref)) for x_rref in x_rrefs]
    return torch.cat([x_rref.to_here() for x_rref in x_rrefs])


def remote_train(stages, batches, num_micro_batches, learning_rate):
    parameters = [p for stage in stages
                  for p in stage.rpc_sync().parameter_rrefs()]
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters,
                                     lr=learning_rate)
    losses = []
    for inputs, targets in batches:
        with dist_autograd.context() as context_id:
            logits = remote_forward(stages, inputs, num_micro_batches)
            loss = GPT.loss(logits, targets)
            dist_autograd.backward(context_id, [loss])
            for stage in stages:
                stage.rpc_sync().wait_for_gradients(context_id)
            optimizer.step(context_id)
        losses.append(loss.item())
    return losses
