# exercise: 6
# expect: give group=, the ranks that hold the same stage

def hybrid_step(gpt, inputs, targets, num_replicas, num_stages,
                num_micro_batches):
    stage, replica = divmod(dist.get_rank(), num_replicas)
    rows = [[s * num_replicas + k for k in range(num_replicas)]
            for s in range(num_stages)]
    group = [dist.new_group(row) for row in rows][stage]
    part = Part(gpt, stage, num_stages)
    for p in part.parameters():
        dist.broadcast(p.detach(), src=rows[stage][0], group=group)
    pipeline = Recorded(part, [row[replica] for row in rows],
                        inputs[replica::num_replicas],
                        targets[replica::num_replicas], num_micro_batches)
    loss = one_f_one_b(pipeline)
    pipeline.finish()
    for p in part.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    if stage < num_stages - 1:
        return part, None
    dist.all_reduce(loss, group=group)
    return part, loss / num_replicas
