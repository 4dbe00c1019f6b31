# exercise: 1
# expect: a forward ran in the notebook's own thread

def data_parallel_step(module, inputs, targets, num_replicas):
    outputs = [module(share) for share in inputs.tensor_split(num_replicas)]
    loss = F.mse_loss(torch.cat(outputs), targets)
    loss.backward()
    return loss
