# exercise: 5
# expect: sizes belong to the axes, not to their place in the order

def predicted_bytes(shape, stage, num_parameters, num_sequences,
                    num_micro_batches, num_layers=config.num_layers,
                    width=config.width, context=config.context,
                    number_bytes=8):
    """Bytes that a rank of this stage sends along "pp", "dp" and "tp"."""
    pp, dp, tp = shape
    sequences = num_sequences // dp // num_micro_batches
    n = sequences * context * width * number_bytes
    num_neighbours = (stage > 0) + (stage < pp - 1)
    blocks = num_layers // pp
    return {"pp": num_micro_batches * num_neighbours * n,
            "dp": 2 * (dp - 1) / dp * num_parameters * number_bytes,
            "tp": num_micro_batches * blocks * 4 * 2 * (tp - 1) / tp * n}


def crossing_bytes(messages, shape, order, ranks_per_node=4):
    """Bytes of each axis that cross nodes in this order of the axes."""
    sizes, crossing = dict(zip(order, shape)), dict.fromkeys(AXES, 0)

    def node_of(rank):
        place, number = dict(zip(AXES, place_of(rank, shape))), 0
        for axis in order:
            number = number * sizes[axis] + place[axis]
        return number // ranks_per_node

    for axis, src, dst, num_bytes in messages:
        if node_of(src) != node_of(dst):
            crossing[axis] += num_bytes
    return crossing
