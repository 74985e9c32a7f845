# SPDX-License-Identifier: Apache-2.0
"""Lines of server logs, as the public reports show them or as the pinned vLLM, PyTorch, NCCL and Linux print them."""

# A start and some service without a fault. Every line is near one that is: same words, another meaning.
GOOD = """\
INFO 11-29 10:00:01 [api_server.py:1210] vLLM API server version 0.33.0
INFO 11-29 10:00:02 [config.py:412] Resolved architecture: DeepseekV41ForCausalLM
(Worker_TP0 pid=101) INFO 11-29 10:00:20 [pynccl.py:111] vLLM is using nccl==2.28.9
node0:101:101 [0] NCCL INFO Bootstrap: Using eth0:192.0.2.7<0>
node0:101:140 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC
Loading safetensors checkpoint shards: 100% Completed | 48/48 [09:41<00:00, 12.1s/it]
(Worker_TP0 pid=101) INFO 11-29 10:12:00 [gpu_worker.py:402] Available KV cache memory: 20.41 GiB
(EngineCore pid=90) INFO 11-29 10:12:01 [kv_cache_utils.py:1149] GPU KV cache size: 5,650,112 tokens
Capturing CUDA graphs (decode, FULL): 100%|##########| 35/35 [00:09<00:00,  3.70it/s]
(Worker_TP0 pid=101) INFO 11-29 10:12:40 [model_runner.py:1164] Graph capturing finished in 11 secs, took 1.02 GiB
(Worker_TP0 pid=101) INFO [jit_monitor.py:85] Kernel JIT monitor activated; monitored JIT compilations during inference
INFO 11-29 10:12:45 [metrics.py:130] SpecDecoding metrics: Drafted: 50 tokens, Avg Draft acceptance rate: 50.0%
INFO:     Application startup complete.
INFO:     192.0.2.9:51012 - "POST /v1/chat/completions HTTP/1.1" 200 OK
"""

# Code to logs that show it, each of one or more lines.
SHOWING = {
    "AMP701": ["ValueError(\"type fp8e4nv not supported in this architecture. The supported fp8 dtypes are "
               "('fp8e4b15', 'fp8e5')\")"],
    "AMP702": ["triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 131072, "
               "Hardware limit: 101376. Reducing block sizes or `num_stages` may help."],
    "AMP703": ["(Worker_TP2 pid=100746) ERROR 04-27 23:40:50 [multiproc_executor.py:962] RuntimeError: Assertion error "
               "(/workspace/.deps/deepgemm-src/csrc/apis/hyperconnection.hpp:56): Unsupported architecture",
               "tvm.error.InternalError: Assertion error (/build/csrc/apis/layout.hpp:59): Unsupported architecture",
               "RuntimeError: Assertion error (/opt/deep_gemm/attention.hpp:12): Unsupported architecture"],
    "AMP704": ["node0:3663:4044 [0] misc/shmutils.cc:129 NCCL WARN Error while creating shared memory segment "
               "/dev/shm/nccl-Ewjreo (size 33030528), error: No space left on device (28)",
               "RuntimeError: Insufficient space in /dev/shm for vLLM message queue: 240 MiB required, 64 MiB free.",
               "node0:2144:2556 [2] include/shm.h:28 NCCL WARN Call to posix_fallocate failed : No space left "
               "on device",
               "ERROR [multiproc_executor.py:381] Worker proc VllmWorker-3 died unexpectedly (exit code: -7), "
               "shutting"],
    "AMP705": ["Capturing CUDA graphs (decode, FULL):  40%|####      | 14/35\n"
               "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total "
               "capacity of",
               "  File \"vllm/v1/worker/gpu/model_runner.py\", line 1150, in capture_model\n"
               "torch.AcceleratorError: CUDA error: out of memory"],
    "AMP706": ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 18.20 GiB. GPU 3 has a total "
               "capacity of 79",
               "torch.AcceleratorError: CUDA error: out of memory",
               "Capturing CUDA graphs: 100%\nINFO Graph capturing finished in 9 secs\n"
               "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."],
    "AMP707": ["ERROR [multiproc_executor.py:381] Worker proc VllmWorker-0 died unexpectedly (exit code: -9), "
               "shutting down",
               "[1234.5] Memory cgroup out of memory: Killed process 4711 (VLLM::Worker_TP) total-vm:149946368kB",
               "[1234.5] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=pod",
               "[1234.5] Out of memory: Killed process 4711 (VLLM::Worker_TP)"],
    "AMP708": ["error: /models/v41: shard model-00017-of-00048.safetensors and 3 more of 48 is missing",
               "FileNotFoundError: No such file or directory: \"/models/v41/model-00017-of-00048.safetensors\""],
    "AMP709": ["error: /models/v41: model-00017-of-00048.safetensors is truncated: 4096 of its 9999999 bytes "
               "are missing",
               "safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata, file "
               "not fully "
               "covered",
               "Exception: Error while deserializing header: MetadataIncompleteBuffer"],
    "AMP710": ["RuntimeError: Gloo connectFullMesh failed with "
               "[../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error",
               "[rank9]:[W ProcessGroupGloo.cpp:721] Warning: Unable to resolve hostname to a (local) address. "
               "Using the "
               "loopback address as fallback. Manually set the network interface to bind to with GLOO_SOCKET_IFNAME."],
    "AMP711": ["RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer "
               "[192.0.2.8]:41532",
               "[rank8]: recvValue failed: Connection reset by peer"],
    "AMP712": ["/opt/cu13/include/cccl/cuda/std/__cccl/cuda_toolkit.h:41:2: error: #error \"CUDA compiler and "
               "CUDA toolkit "
               "headers are incompatible, please check your include paths\""],
    "AMP713": ["RuntimeError: Failed to find C compiler. Please specify via CC environment variable.",
               "/bin/sh: 1: nvcc: not found",
               "FileNotFoundError: [Errno 2] No such file or directory: '/usr/local/cuda/bin/nvcc'",
               "AssertionError: `nvidia-cuda-nvcc` installed but no `nvcc` found"],
    "AMP714": ["ValueError: Model architectures ['DeepseekV41ForCausalLM'] are not supported for now. Supported "
               "architectures:",
               "The checkpoint has model type `deepseek_v41` but Transformers does not recognize this architecture."],
    "AMP715": ["ValueError: To serve at least one request with the model's max seq len (1048576), (3.21 GiB KV "
               "cache is needed, "
               "which is larger than the available KV cache memory (1.02 GiB). Based on the available memory, "
               "the estimated",
               "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"],
    "AMP716": ["ValueError: Free memory on device cuda:3 (58.91/79.15 GiB) on startup is less than desired GPU memory "
               "utilization (0.92, 72.82 GiB). Decrease GPU memory utilization"],
    "AMP717": ["torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device"],
    "AMP718": ["RuntimeError: The NVIDIA driver on your system is too old (found version 12080). Please update "
               "your GPU driver",
               "CUDA driver version is insufficient for CUDA runtime version",
               "Error 804: forward compatibility was attempted on non supported HW"],
    "AMP719": ["ValueError: DeepseekV41ForCausalLM does not support dspark with pipeline parallelism",
               "NotImplementedError: Pipeline parallelism is not supported for this model. Supported models "
               "implement the"],
    "AMP720": ["ValueError: DeepSeek V4 vision MoE routing requires input_ids."],
    "AMP721": ["NotImplementedError: layer 28 reads the compressed cache of layer 20, which is not on this "
               "rank; PP splits "
               "inside a v4.1 kv-sharing group are not supported."],
    "AMP722": ["INFO [shm_broadcast.py:112] No available shared memory broadcast block found in 60 seconds. "
               "This typically"],
    "AMP723": ["torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
               "[ 812.1] NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, name=VLLM::Worker_TP, Ch 0000000c, intr "
               "00000000. MMU Fault",
               "[ 812.1] NVRM: Xid (PCI:0000:3b:00): 13, Graphics Exception: ESR 0x505730=0x20009"],
    "AMP724": ["RuntimeError: Invalid thread config: thread_m_blocks = 1, thread_k = 128, thread_n = 64"],
    "AMP725": ["WARNING [engram.py:908] Sharding the offloaded Engram tables across DP replicas: RuntimeError: "
               "too small",
               "WARNING Engram DP replicas are not co-located on one node; storing the offloaded tables per "
               "rank instead of "
               "sharing them."],
    "AMP726": ["torch.distributed.DistBackendError: NCCL error in: "
               "/pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, "
               "unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.28.9",
               "[rank3]:[E ProcessGroupNCCL.cpp:683] [Rank 3] Watchdog caught collective operation timeout: "
               "WorkNCCL(SeqNum=7",
               "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
               "prematurely."],
    "AMP727": ["error: vLLM in /opt/venv/lib/python3.12/site-packages is not patched for Ampere: partly applied",
               "AttributeError: module 'vllm' has no attribute 'LLM'",
               "ImportError: cannot import name 'LLM' from 'vllm' (unknown location)"],
    "AMP728": ["[ 812.1] NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, GPU has fallen off the bus.",
               *(f"[ 812.1] NVRM: Xid (PCI:0000:3b:00): {number}, pid=4711" for number in (48, 63, 64, 94, 95)),
               "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"],
    "AMP729": ["ValueError: World size (16) is larger than the number of available GPUs (8) in this node."],
    "AMP730": ["OSError: [Errno 98] Address already in use",
               "RuntimeError: The server socket has failed to listen on any local network address. code: -98, "
               "name: EADDRINUSE"],
    "AMP731": ["error: /models/v41: the tokenizer has 99999 token classes, config.json says 99092 "
               "(engram_compressed_vocab_size)"],
    "AMP732": ["INFO SpecDecoding metrics: Mean acceptance length: 1.00, Accepted: 0 tokens, Avg Draft "
               "acceptance rate: 0.0%",
               "INFO SpecDecoding metrics: Drafted: 0 tokens, Avg Draft acceptance rate: nan%"],
    "AMP733": ["WARNING [jit_monitor.py:140] Triton kernel JIT compilation during inference: "
               "_sparse_mla_kernel. This causes a",
               "WARNING [jit_monitor.py:140] Triton autotuning during inference: _score_kernel. This causes a "
               "latency spike",
               "WARNING [jit_monitor.py:140] TileLang JIT compilation during inference: mhc_pre. This causes a "
               "latency spike"],
}  # fmt: skip
