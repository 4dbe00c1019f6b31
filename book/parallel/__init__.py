"""L2: the small GPT that every lab trains and splits, the text that it learns, and ways to train it on many ranks.

    model           GPTConfig, GPT: a decoder-only transformer whose parts can be split
    text            the book's story, its characters as tokens, windows of it for training
    data            data parallelism: the same state on all ranks, gradients averaged in buckets
    tensor          tensor parallelism: layers cut over ranks, and the GPT made of them
    sharded         Zero1, Zero2, Zero3: optimizer state, gradients and parameters sharded over data-parallel ranks
    stage           GPTStage: consecutive blocks of the GPT, for one stage of a pipeline
    pipeline        run_pipeline, Stage, Mail: any pipeline schedule over messages; 1F1B written out
    split_backward  a backward in two halves, with the weight gradients deferred: I and W
    remote          RemotePipeline: stages on other workers, called over RPC; replicas of such pipelines (DP+PP)
    paced           PacedLinear: a layer that takes as long as it is told
    hybrid          Hybrid: tensor, pipeline and data parallelism on one mesh
    context         context parallelism: ring_attention and its rivals, ContextParallel
    experts         expert parallelism: routing, dispatch and combine by all-to-all, MoE and ExpertParallel
    axes            FiveAxes: Hybrid with sequences cut over cp, and experts folded over dp and cp
    asynchronous    asynchronous tensor parallelism: a gather or reduce-scatter in hops, each beside a part of a product
    rarely          Rarely: ranks that train apart and agree every so many steps: local SGD, DiLoCo; Streaming: on
                    one part of the weights after another
    compressed      TopK: a hook for DDP that sends the largest numbers of a gradient, and keeps the rest for later
    line            SlowLine: a process group whose messages take as long as on a slow line
    quorum          one replica of a training that goes on when another dies, with torchft
    replicas        Replicas: such replicas as processes, started, killed and heard one by one; the run replayed by one
    weights         pieces, buckets, WeightSender, WeightReceiver: a trainer's weights on their way to generators
    checked         argument checks, kept apart from the code that chapters show
"""
from book.extras import needed_by

with needed_by("book.parallel", "torch"):
    from book.parallel.data import BucketedDDP, broadcast_state
    from book.parallel.model import GPT, GPTConfig
    from book.parallel.paced import PacedLinear
    from book.parallel.text import Characters, Windows, load_text

__all__ = ["GPT", "BucketedDDP", "Characters", "GPTConfig", "PacedLinear", "Windows", "broadcast_state", "load_text"]
