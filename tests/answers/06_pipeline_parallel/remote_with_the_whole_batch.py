# exercise: 5
# expect: stage 0 gets the whole batch in one call: cut it into 4 micro-batches

def remote_forward(stages, inputs, num_micro_batches):
    logits = []
    for x in [inputs]:
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
        with dist_autograd.context() as context_id:
            logits = remote_forward(stages, inputs, num_micro_batches)
            loss = GPT.loss(logits, targets)
            dist_autograd.backward(context_id, [loss])
            for stage in stages:
                stage.rpc_sync().wait_for_gradients(context_id)
            optimizer.step(context_id)
        losses.append(loss.item())
    return losses
