# exercise: 6
# expect: pass

from torch.distributed.device_mesh import init_device_mesh


def hybrid_step(gpt, inputs, targets, num_replicas, num_stages, num_micro_batches):
    device = next(gpt.parameters()).device.type
    mesh = init_device_mesh(device, (num_stages, num_replicas), mesh_dim_names=("pp", "dp"))
    stage, replica = mesh.get_coordinate()
    part = Part(gpt, stage, num_stages)
    flat = torch.cat([p.detach().flatten() for p in part.parameters()])
    dist.broadcast(flat, group=mesh.get_group("dp"), group_src=0)
    with torch.no_grad():
        for p, piece in zip(part.parameters(), flat.split([p.numel() for p in part.parameters()])):
            p.copy_(piece.view_as(p))
    share = [t.chunk(num_replicas)[replica] for t in (inputs, targets)]
    pipeline = Recorded(part, dist.get_process_group_ranks(mesh.get_group("pp")), *share, num_micro_batches)
    loss = one_f_one_b(pipeline)
    pipeline.finish()
    works = []
    for p in part.parameters():
        p.grad /= num_replicas
        works.append(dist.all_reduce(p.grad, group=mesh.get_group("dp"), async_op=True))
    for work in works:
        work.wait()
    if pipeline.after is not None:
        return part, None
    losses = [torch.zeros_like(loss) for _ in range(num_replicas)]
    dist.all_gather(losses, loss, group=mesh.get_group("dp"))
    return part, sum(losses) / num_replicas
