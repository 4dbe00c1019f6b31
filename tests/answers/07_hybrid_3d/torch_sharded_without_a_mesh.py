# exercise: 6
# expect: has fully_shard been given a mesh? mesh=mesh["dp"]

def torch_parts(gpt, mesh, num_micro_batches, make_optimizer):
    """This rank's part of a GPT, its pipeline schedule, its optimizer."""
    part = GPTStage(gpt, mesh.get_local_rank("pp"), mesh["pp"].size())
    kept = part.model.blocks[part.first:part.last]
    columns, rows = ColwiseParallel(), RowwiseParallel()
    plan = {"attention.q": columns, "attention.k": columns,
            "attention.v": columns, "attention.out": rows,
            "mlp.up": columns, "mlp.down": rows}
    for block in kept:
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block)
    fully_shard(part)
    stage = PipelineStage(part, mesh.get_local_rank("pp"), mesh["pp"].size(),
                          torch.device(mesh.device_type),
                          group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, num_micro_batches, loss_fn=GPT.loss)
    return part, schedule, make_optimizer(part.parameters())
