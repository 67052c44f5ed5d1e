"""The figures that a machine without GPUs, or this project, cannot show, and what they need."""

from __future__ import annotations

from vlora.bench.paper.figure import Elsewhere
from vlora.bench.paper.measured.machine_costs import SIMULATOR_COSTS

_LARGE = "GPUs with several ranks over NCCL, and a checkpoint of Llama-3.1-70B (141 GB)"
_TP = "vlora bench tp --out DIR"
_SPLIT = "vlora base serve --device cuda, then vlora.split.connect in the clients (docs/split.md)"

ELSEWHERE = (
    Elsewhere(
        paper="v-lora",
        number="fig3",
        title="zero-shot grounding and visual question answering of an LMM against YOLO and OSCAR",
        needs="the weights of Qwen-VL-7B, YOLO and OSCAR, and the datasets Aircraft and VQAv2; the paper: F1 67.2 % "
        "against 18.3 %, accuracy 78.8 % against 73.3 %. The embedded model here is made for its own rendered world, "
        "so it has no comparable zero-shot ability",
    ),
    Elsewhere(
        paper="s-lora",
        number="fig7",
        title="throughput on a real trace",
        needs="the trace of LMSYS Chatbot Arena; a CSV of it is replayed in the simulator",
        command=f"vlora simulate TRACE.csv --adapters 26 --costs DIR/measured/{SIMULATOR_COSTS}",
    ),
    Elsewhere(
        paper="punica",
        number="fig12",
        title="text generation with a 70 B model",
        needs="eight GPUs of 40 GB, and a checkpoint of Llama-2-70B",
        command="vlora serve MODEL --tensor-parallel 8, then vlora bench serve --url http://127.0.0.1:8000/v1 "
        "--model base",
    ),
    Elsewhere(
        paper="punica",
        number="fig13",
        title="a cluster of 16 GPUs over an hour",
        needs="16 GPUs; simulated with Punica's costs and this project's router by another benchmark",
        command="vlora bench cluster --out DIR",
    ),
    Elsewhere(
        paper="bd-lora",
        number="fig11",
        title="throughput and latency of Llama-3.1-70B (also figures 5, 13 and 15)",
        needs=_LARGE,
        command=_TP,
    ),
    Elsewhere(
        paper="bd-lora",
        number="fig12",
        title="throughput with prompts of 4,096 tokens, and with answers of 1,024 (figure 14)",
        needs="several GPUs; the benchmark of ranks has steps after prompts of 256 tokens, as figure 10 here",
        command=_TP,
    ),
    Elsewhere(
        paper="bd-lora",
        number="fig16",
        title="two, four and eight ranks (also figures 17 and 18)",
        needs="2, 4 and 8 GPUs; on a CPU more ranks than cores measure the scheduler of the operating system",
        command=_TP,
    ),
    Elsewhere(
        paper="bd-lora",
        number="fig19",
        title="adapters on attention or MLP layers only (also figures 20 to 22)",
        needs="GPUs; the adapters of the tp benchmark are on all linear layers",
        command=_TP,
    ),
    Elsewhere(
        paper="bd-lora",
        number="fig23",
        title="adapters loaded from disk for every request",
        needs="GPUs, and the authors' load generator (LLMPerf)",
        command="vlora serve MODEL --tensor-parallel N, then vlora bench serve --url URL --model base "
        "--adapter-name NAME",
    ),
    Elsewhere(
        paper="bd-lora",
        number="fig24",
        title="throughput on GPUs without NVLink (also figure 25)",
        needs="eight A10G; figure 10 here has a slower network in its plots with an added delay",
        command=_TP,
    ),
    Elsewhere(
        paper="symbiosis",
        number="fig11",
        title="trainings on one GPU, latency and throughput beside copies (also figure 12)",
        needs="a GPU that holds several copies of a model; here the processor time of one client is compared",
        command="vlora bench split --part speed",
    ),
    Elsewhere(
        paper="symbiosis",
        number="fig13",
        title="trainings with the executor and the clients on GPUs of their own (also figures 14 to 18)",
        needs="two to eight GPUs, and checkpoints of Llama-2-13B, StarCoder2-15B and Gemma-2-27B",
        command=_SPLIT,
    ),
    Elsewhere(
        paper="symbiosis",
        number="fig19",
        title="clients on a CPU, the executor on a GPU, long contexts (also figure 20)",
        needs="a GPU, and KV caches that exceed its memory",
        command=_SPLIT,
    ),
    Elsewhere(
        paper="symbiosis",
        number="fig21",
        title="noise over a network",
        needs="two hosts; the processor time of noise is in docs/decisions/0077-split-execution.md",
        command="vlora base serve --bind HOST:PORT, then vlora.split.connect with Noise (docs/split.md)",
    ),
    Elsewhere(
        paper="symbiosis",
        number="table2",
        title="time of a training step by rank and adapted layers",
        needs="a GPU, and a checkpoint of Llama-2-13B",
        command=_SPLIT,
    ),
    Elsewhere(
        paper="symbiosis",
        number="table4",
        title="prefill of small and large requests together in vLLM",
        needs="a GPU and vLLM; its lockstep is that of table 5 here",
    ),
)
