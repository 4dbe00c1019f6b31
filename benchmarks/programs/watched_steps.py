"""Steps of training, as many as a connection asks for, and their CPU seconds: PORT KIND WIDTH."""
import socket
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

PORT, KIND, WIDTH = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
NUM_LAYERS, BATCH = 8, 64
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())
                              for _ in range(NUM_LAYERS)])
if KIND == "FSDP2":
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
else:
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x, y = torch.randn(2, BATCH, WIDTH)
with socket.create_connection(("127.0.0.1", PORT)) as connection, connection.makefile("rw") as asked:
    print("watched" if "book.tap" in sys.modules else "plain", file=asked, flush=True)
    for line in asked:
        since_s = time.process_time()
        for _ in range(int(line)):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        print(time.process_time() - since_s, file=asked, flush=True)
dist.destroy_process_group()
