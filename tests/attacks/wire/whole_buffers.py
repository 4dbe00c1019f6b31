# exercise: 1
# ends: over a wire that only sends and receives, with 4 ranks: a rank sends 3 messages

# Everybody's whole buffer goes once round: a ring, and far too many bytes.
def ring_all_reduce(buffer):
    rank, size = dist.get_rank(), dist.get_world_size()
    passing = buffer.clone()
    for _ in range(size - 1):
        came = torch.empty_like(buffer)
        transfers = [dist.P2POp(dist.isend, passing, (rank + 1) % size),
                     dist.P2POp(dist.irecv, came, (rank - 1) % size)]
        for request in dist.batch_isend_irecv(transfers):
            request.wait()
        buffer += came
        passing = came
