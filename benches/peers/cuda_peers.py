#!/usr/bin/env python3
"""Times what others offer for attention on an NVIDIA GPU beside our kernels, in turns, and says what the bars say.

    python3 benches/peers/cuda_peers.py --ours PROGRAM --out FILE [--rounds 3] [--samples 20] [--only TEXT] [--quick]
    python3 benches/peers/cuda_peers.py --join FILE [FILE ...]

PROGRAM is `benches/cuda.rs`, built; it is started once and asked for one row after another. For every shape, each
round times ours and then each peer; a peer's row in FILE carries the median of its rounds, and as its ratio our speed
over its. `--join` prints the table again from files. Needs torch and, for the last peer, triton.

Peers: torch's scaled_dot_product_attention by FlashAttention-2 and by cuDNN (plain scores only: neither knows a phase);
and a Triton kernel of TAPA as its paper describes it: one pass, two products, the cosine of the hardware, the distance's
power computed where it is used. Every one is timed as ours: by CUDA events, the median of the samples, each after a
copy that empties the L2 cache and that the host outruns.

Training steps are compared with a LLaMA of the same sizes in torch: RoPE on its scaled_dot_product_attention, ALiBi with
a bias, TAPA and TAPE by tensor operations, which is what one writes in an afternoon; bf16 by autocast, AdamW as torch
has it. These are timed by the host's clock.
"""
import argparse
import csv
import math
import os
import statistics
import subprocess
import sys
import time

try:
    import torch
except ImportError:
    torch = None
try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

HEADER = ["bench", "peer", "gpu", "dtype", "shape", "milliseconds", "rate", "unit", "ratio"]
US = "candle-posenc"


def shape_text(b, h, g, t, s, d, e, causal):
    return f"b{b}_h{h}_g{g}_t{t}_s{s}_d{d}_e{e}_{'causal' if causal else 'full'}"


def parse_shape(text):
    parts = text.split("_")
    sizes = {part[0]: int(part[1:]) for part in parts[:-1]}
    return sizes, parts[-1] == "causal"


def cases():
    """(bench, dtype, shape, peers); the first three as in `benches/cuda.rs`."""
    attention = ["torch-fa2", "torch-cudnn"]
    for h, d in ((16, 128), (32, 64)):
        for n in (2048, 8192, 16384, 32768):
            b = max(1, 16384 // n)
            shape = shape_text(b, h, h, n, n, d, d, True)
            yield "attend_fwd/plain", "bf16", shape, attention
            yield "attend_fwd/alibi", "bf16", shape, []
            yield "attend_fwd/tapa_fast", "bf16", shape, ["triton-tapa"]
            yield "attend_fwd/tapa_precise", "bf16", shape, []
            yield "attend_fwd/tape", "bf16", shape_text(b, h, h, n, n, d, 2 * d, True), []
        full = shape_text(1, h, h, 16384, 16384, d, d, False)
        causal = shape_text(1, h, h, 16384, 16384, d, d, True)
        yield "attend_fwd/plain", "bf16", full, attention
        yield "attend_fwd/alibi", "bf16", full, []
        yield "attend_fwd/tapa_fast", "bf16", full, ["triton-tapa"]
        yield "attend_fwd/plain", "f16", causal, attention
        yield "attend_fwd/alibi", "f16", causal, []
        yield "attend_fwd/tapa_fast", "f16", causal, ["triton-tapa"]
    grouped = shape_text(1, 32, 8, 16384, 16384, 128, 128, True)
    yield "attend_fwd/plain", "bf16", grouped, attention
    yield "attend_fwd/alibi", "bf16", grouped, []
    yield "attend_fwd/tapa_fast", "bf16", grouped, ["triton-tapa"]
    yield "attend_fwd/tapa_precise", "bf16", grouped, []
    for h, d in ((16, 128), (32, 64)):
        for part in ("attend_bwd", "attend_fwd_bwd"):
            for n in (2048, 8192, 16384):
                b = max(1, 16384 // n)
                shape = shape_text(b, h, h, n, n, d, d, True)
                yield f"{part}/plain", "bf16", shape, attention
                yield f"{part}/alibi", "bf16", shape, []
                yield f"{part}/tapa_fast", "bf16", shape, []
                yield f"{part}/tapa_precise", "bf16", shape, []
                yield f"{part}/tape", "bf16", shape_text(b, h, h, n, n, d, 2 * d, True), []
            shape = shape_text(1, h, h, 8192, 8192, d, d, True)
            yield f"{part}/plain", "bf16", shape, attention
            yield f"{part}/tapa_fast", "bf16", shape, []
    yield "attend_fwd_bwd/tapa_dense", "bf16", shape_text(1, 16, 16, 8192, 8192, 128, 128, True), []
    yield "attend_fwd_bwd/tapa_fast", "bf16", shape_text(1, 4, 4, 8192, 8192, 128, 128, True), []
    yield "attend_fwd_bwd/tapa_dense", "bf16", shape_text(1, 4, 4, 8192, 8192, 128, 128, True), []
    large = shape_text(1, 16, 16, 65536, 65536, 128, 128, True)
    for bench in ("copy_x", "rotate_fwd/rope", "rotate_bwd/rope", "rotate_fwd/tape", "rotate_bwd/tape"):
        yield bench, "bf16", large, []
    wide = shape_text(1, 16, 16, 8192, 8192, 128, 256, True)
    for bench in ("attend_fwd/tape", "attend_fwd_bwd/tape", "tape_update_fwd", "tape_update_fwd_bwd"):
        yield bench, "bf16", wide, []
    model = shape_text(64, 6, 6, 512, 512, 64, 64, True)
    for encoding in ("rope", "alibi", "tapa", "tape"):
        yield f"train_step/{encoding}", "bf16", model, ["torch-step"]
        for part in ("forward", "backward", "optimizer"):
            yield f"train_{part}/{encoding}", "bf16", model, []
    long = shape_text(1, 8, 8, 131072, 131072, 128, 128, True)
    yield "attend_fwd/plain", "bf16", long, attention
    yield "attend_fwd/tapa_fast", "bf16", long, ["triton-tapa"]
    decode = [shape_text(1, 32, 8, 1, s, 128, 128, True) for s in (4096, 32768, 131072)]
    yield "copy", "bf16", decode[-1], ["torch-copy"]
    for shape in decode:
        yield "attend_decode/plain", "bf16", shape, attention
        yield "attend_decode/alibi", "bf16", shape, []
        yield "attend_decode/tapa_precise", "bf16", shape, []


def rate(bench, shape, milliseconds):
    """(rate, unit), counted as `benches/cuda.rs` does."""
    sizes, causal = parse_shape(shape)
    if bench == "copy":
        return 2 * (1 << 30) / milliseconds / 1e9, "TB/s"
    width = sizes["d"] + sizes["e"]
    if bench.startswith(("train", "tape_update")):
        return sizes["b"] * sizes["t"] / milliseconds / 1e3, "Mtoken/s"
    if bench == "copy_x" or bench.startswith("rotate"):
        data = sizes["b"] * sizes["h"] * sizes["t"] * sizes["d"] * 2
        table = 8 * sizes["t"] * sizes["d"] // 2 * (sizes["b"] * sizes["g"] if bench.endswith("tape") else 1)
        moved = {
            "copy_x": 2 * data,
            "rotate_bwd/tape": 3 * data + 2 * table,
        }.get(bench, 2 * data + table)
        return moved / milliseconds / 1e9, "TB/s"
    if bench.startswith("attend_decode"):
        return sizes["b"] * sizes["g"] * sizes["s"] * width * 2 / milliseconds / 1e9, "TB/s"
    pairs = sizes["b"] * sizes["h"] * sizes["t"] * sizes["s"] / (2 if causal else 1)
    passes = {"attend_fwd": 1, "attend_bwd": 2.5, "attend_fwd_bwd": 3.5}[bench.split("/")[0]]
    return passes * 2 * pairs * width / milliseconds / 1e9, "TFLOP/s"


class Ours:
    """The program that times our kernels, kept running."""

    def __init__(self, program, samples):
        command = [program, "--serve", "--samples", str(samples)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def time(self, bench, dtype, shape):
        """The row's fields, or None where it fails."""
        if self.process.poll() is not None:
            return None
        self.process.stdin.write(f"{bench} {dtype} {shape}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline().strip()
        if not line or line.startswith(("error", "skipped")):
            print(f"ours: {bench} {dtype} {shape}: {line or 'the program ended'}", file=sys.stderr)
            return None
        return dict(zip(HEADER, line.split(",")))

    def close(self):
        self.process.stdin.close()
        self.process.wait()


class Peers:
    """What others offer, on torch tensors."""

    def __init__(self, samples):
        self.samples = samples
        self.filler = [torch.zeros(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2)]
        self.gpu = torch.cuda.get_device_name()
        self.best = {}
        self.ranked = {}

    def fill(self):
        self.filler[1].copy_(self.filler[0])

    def median(self, run, samples=None):
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        times = []
        for _ in range(samples or self.samples):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.fill()
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return statistics.median(times)

    def operands(self, dtype, shape):
        sizes, causal = parse_shape(shape)
        kind = {"bf16": torch.bfloat16, "f16": torch.float16}[dtype]
        b, h, g, t, s, d, e = (sizes[letter] for letter in "bhgtsde")
        normal = lambda *dims: torch.randn(*dims, device="cuda", dtype=kind)
        return normal(b, h, t, d), normal(b, g, s, d), normal(b, g, s, e), causal and t > 1

    def time(self, peer, bench, dtype, shape):
        """(name, milliseconds), the name longer where the peer had to be helped."""
        if peer == "torch-step":
            return peer, self.time_step(bench.split("/")[1], shape)
        if bench.startswith(("attend_bwd", "attend_fwd_bwd")):
            return peer, self.time_gradients(peer, bench, dtype, shape)
        with torch.no_grad():
            if peer == "torch-copy":
                return peer, self.median(self.fill)
            q, k, v, causal = self.operands(dtype, shape)
            if peer == "triton-tapa":
                return peer, self.time_tapa(q, k, v, causal, (dtype, shape))
            return self.time_sdpa(peer, q, k, v, causal)

    def time_gradients(self, peer, bench, dtype, shape):
        from torch.nn.attention import sdpa_kernel

        q, k, v, causal = self.operands(dtype, shape)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        gradient = torch.randn(*q.shape[:3], v.shape[3], device="cuda", dtype=q.dtype)

        def forward():
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

        with sdpa_kernel(sdpa_backend(peer)):
            if bench.startswith("attend_fwd_bwd"):
                return self.median(lambda: torch.autograd.grad(forward(), leaves, gradient))
            out = forward()
            return self.median(
                lambda: torch.autograd.grad(out, leaves, gradient, retain_graph=True)
            )

    def time_step(self, encoding, shape):
        """Of the torch model, by the host's clock: what it takes from one idle GPU to the next."""
        sizes, _ = parse_shape(shape)
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.manual_seed(1)
        model = Model(encoding, sizes["h"], sizes["d"]).cuda()
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0)
        text = torch.randint(256, (1 << 20,), device="cuda")
        window = torch.arange(sizes["t"] + 1, device="cuda")

        def step():
            starts = torch.randint(len(text) - len(window), (sizes["b"], 1), device="cuda")
            tokens = text[starts + window]
            with torch.autocast("cuda", torch.bfloat16):
                logits = model(tokens[:, :-1])
                loss = torch.nn.functional.cross_entropy(
                    logits.float().flatten(0, 1), tokens[:, 1:].flatten()
                )
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            # As a training loop that logs does, and as ours.
            loss.item()

        times = []
        for sample in range(self.samples + 3):
            torch.cuda.synchronize()
            started = time.perf_counter()
            step()
            torch.cuda.synchronize()
            if sample >= 3:
                times.append(1e3 * (time.perf_counter() - started))
        return statistics.median(times)

    def time_sdpa(self, peer, q, k, v, causal):
        from torch.nn.attention import sdpa_kernel

        backend = sdpa_backend(peer)
        grouped = q.shape[1] != k.shape[1]

        def attend(k, v, grouped):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=causal, enable_gqa=grouped
            )

        with sdpa_kernel(backend):
            try:
                attend(k, v, grouped)
            except RuntimeError:
                if not grouped:
                    raise
                # It knows no grouped heads: give it copies, made before the clock runs.
                group = q.shape[1] // k.shape[1]
                k, v = (x.repeat_interleave(group, 1) for x in (k, v))
                peer, grouped = f"{peer}-repeated-heads", False
            return peer, self.median(lambda: attend(k, v, grouped))

    def time_tapa(self, q, k, v, causal, key):
        if triton is None:
            raise RuntimeError("triton is not installed")
        if key not in self.best:
            # Each tile takes seconds to compile: after a width's first shape, its three best are tried.
            width, trials = q.shape[3], []
            for tiles in self.ranked.get(width, TAPA_TILES)[:3 if width in self.ranked else None]:
                try:
                    trials.append((self.median(lambda: tapa(q, k, v, causal, tiles), 5), tiles))
                except Exception as error:  # a tile that does not fit the GPU
                    print(f"triton-tapa {tiles}: {str(error).splitlines()[0]}", file=sys.stderr)
            trials.sort()
            self.ranked.setdefault(width, [tiles for _, tiles in trials])
            self.best[key] = trials[0][1]
            self.check_tapa(q, k, v, causal, self.best[key])
        return self.median(lambda: tapa(q, k, v, causal, self.best[key]))

    def check_tapa(self, q, k, v, causal, tiles):
        """The kernel's last rows of the first head against the formula: a peer that is wrong is none."""
        n, d = q.shape[2], q.shape[3]
        half = d // 2
        rows = slice(n - 64, n)
        got = tapa(q, k, v, causal, tiles)[0, 0, rows].double()
        qs, ks, vs = q[0, 0, rows].double(), k[0, 0].double(), v[0, 0].double()
        m = torch.arange(n - 64, n, device="cuda").double()[:, None]
        distance = (m - torch.arange(n, device="cuda").double()[None, :])
        power = distance.abs() ** 0.1
        turns = power * (qs[:, half:] @ ks[:, half:].T) / math.sqrt(d - half)
        scores = qs[:, :half] @ ks[:, :half].T / math.sqrt(half) * torch.cos(2 * math.pi * turns)
        if causal:
            scores = scores.masked_fill(distance < 0, -math.inf)
        error = (got - scores.softmax(-1) @ vs).abs().max().item()
        if not error < 0.02:
            raise RuntimeError(f"the Triton kernel is off by {error}")


def sdpa_backend(peer):
    from torch.nn.attention import SDPBackend

    return {
        "torch-fa2": SDPBackend.FLASH_ATTENTION,
        "torch-cudnn": SDPBackend.CUDNN_ATTENTION,
    }[peer]


if torch is not None:
    functional = torch.nn.functional

    class Attention(torch.nn.Module):
        """Causal attention of one encoding; for TAPE it returns the averaged state beside its output."""

        ALPHA, GAIN = 0.1, 0.3

        def __init__(self, encoding, heads, width):
            super().__init__()
            self.encoding, self.heads, self.width = encoding, heads, width
            columns = heads * width
            self.projections = torch.nn.Linear(columns, 3 * columns, bias=False)
            self.output = torch.nn.Linear(columns, columns, bias=False)

        def forward(self, x, place):
            b, t, columns = x.shape
            split = self.projections(x).unflatten(2, (3, self.heads, self.width))
            q, k, v = (part.transpose(1, 2) for part in split.unbind(2))
            carried = None
            if self.encoding in ("rope", "tape"):
                q, k = (turn(part, *place["state"]).to(v.dtype) for part in (q, k))
            if self.encoding == "tape":
                state = torch.cat([part.expand(b, self.heads, t, -1) for part in place["state"]], 3)
                both = torch.cat([v, state.to(v.dtype)], 3)
                out = functional.scaled_dot_product_attention(q, k, both, is_causal=True)
                out, carried = out.split([self.width, self.width], 3)
            elif self.encoding == "alibi":
                bias = place["bias"].to(q.dtype)
                out = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
            elif self.encoding == "tapa":
                out = self.phase_attention(q, k, v, place)
            else:
                out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.output(out.transpose(1, 2).reshape(b, t, columns)), carried

        def phase_attention(self, q, k, v, place):
            half = self.width // 2
            amplitude = (q[..., :half] @ k[..., :half].mT).float() / math.sqrt(half)
            phase_q, phase_k = (
                self.GAIN * functional.rms_norm(part[..., half:].float(), (half,), eps=1e-6)
                for part in (q, k)
            )
            turns = phase_q @ phase_k.mT / math.sqrt(half) * place["power"]
            scores = amplitude * torch.cos(2 * math.pi * turns)
            scores = scores.masked_fill(place["future"], -math.inf)
            return scores.softmax(3).to(v.dtype) @ v

    def turn(x, cos, sin):
        one, other = x.chunk(2, 3)
        return torch.cat([one * cos - other * sin, one * sin + other * cos], 3)

    class Block(torch.nn.Module):
        RANK = 24

        def __init__(self, encoding, heads, width):
            super().__init__()
            columns = heads * width
            inner = columns * 8 // 3
            self.before_attention = torch.nn.RMSNorm(columns)
            self.attention = Attention(encoding, heads, width)
            self.before_mlp = torch.nn.RMSNorm(columns)
            self.up = torch.nn.Linear(columns, 2 * inner, bias=False)
            self.down = torch.nn.Linear(inner, columns, bias=False)
            if encoding == "tape":
                self.gain = torch.nn.Parameter(torch.zeros(heads))
                self.gate = torch.nn.Linear(columns, self.RANK, bias=False)
                self.rise = torch.nn.Parameter(torch.zeros(self.RANK, heads))
                self.fall = torch.nn.Parameter(0.02 * torch.randn(heads, self.RANK))

        def forward(self, x, place):
            out, carried = self.attention(self.before_attention(x), place)
            x = x + out
            gate, value = self.up(self.before_mlp(x)).chunk(2, 2)
            out = self.down(functional.silu(gate) * value)
            if carried is not None:
                self.update(place, carried, out)
            return x + out

        def update(self, place, carried, out):
            """TAPE: what attention averaged, by a gain a head; then what the token says, mixing heads."""
            gain = self.gain[:, None, None]
            gate = functional.silu(self.gate(out)).float()
            new = []
            for old, mean in zip(place["state"], carried.float().chunk(2, 3)):
                mixed = old + gain * mean
                mixed = mixed + torch.einsum("he,bte,ef,bftd->bhtd", self.fall, gate, self.rise, mixed)
                new.append(mixed)
            place["state"] = new

    class Model(torch.nn.Module):
        """A byte-level LLaMA: 6 layers, a tied head."""

        def __init__(self, encoding, heads, width, layers=6):
            super().__init__()
            self.encoding, self.heads, self.width = encoding, heads, width
            self.embedding = torch.nn.Embedding(256, heads * width)
            self.blocks = torch.nn.ModuleList(Block(encoding, heads, width) for _ in range(layers))
            self.norm = torch.nn.RMSNorm(heads * width)
            for module in self.modules():
                if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
                    torch.nn.init.normal_(module.weight, 0, 0.02)

        def place(self, t, device):
            """What depends on positions alone, made anew in each step as a prototype does."""
            steps = torch.arange(t, device=device)
            if self.encoding in ("rope", "tape"):
                even = torch.arange(0, self.width, 2, device=device).double()
                angles = steps.double()[:, None] * 10000 ** (-even / self.width)
                return {"state": [part.float()[None, None] for part in (angles.cos(), angles.sin())]}
            distance = steps[:, None] - steps[None, :]
            future = distance < 0
            if self.encoding == "alibi":
                slopes = torch.tensor(alibi_slopes(self.heads), device=device)[:, None, None]
                bias = (-slopes * distance).masked_fill(future, -math.inf)
                return {"bias": bias[None]}
            return {"future": future, "power": distance.clamp(min=0).float() ** Attention.ALPHA}

        def forward(self, tokens):
            place = self.place(tokens.shape[1], tokens.device)
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x, place)
            return functional.linear(self.norm(x), self.embedding.weight)

    def alibi_slopes(heads):
        """A geometric sequence for a power of two; beyond it every other slope of the next one's."""
        power = 1 << (heads.bit_length() - 1)
        slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
        return slopes + [2 ** (-4 * (i + 1) / power) for i in range(0, 2 * (heads - power), 2)]


# Queries, keys, warps and stages of the Triton kernel's blocks: the best is taken for each shape.
TAPA_TILES = [
    (128, 64, 8, 3),
    (128, 128, 8, 2),
    (64, 64, 4, 3),
    (128, 64, 4, 3),
    (128, 32, 4, 4),
    (64, 128, 4, 2),
    (128, 64, 8, 2),
]


if triton is not None:

    @triton.jit
    def cosine_of_turns(turns):
        # Whole turns are dropped before the hardware's cosine, which is poor at large arguments.
        whole = tl.inline_asm_elementwise(
            "cvt.rni.f32.f32 $0, $1;", "=f,f", [turns], dtype=tl.float32, is_pure=True, pack=1
        )
        radians = (turns - whole) * 6.283185307179586
        return tl.inline_asm_elementwise(
            "cos.approx.ftz.f32 $0, $1;", "=f,f", [radians], dtype=tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def tapa_kernel(q, k, v, out, length, scale, turns_scale, alpha, group,
                    WIDTH: tl.constexpr, HALF: tl.constexpr, CAUSAL: tl.constexpr,
                    ROWS: tl.constexpr, KEYS: tl.constexpr):
        # Long rows of causal tiles first.
        tile = tl.num_programs(0) - 1 - tl.program_id(0)
        head = tl.program_id(1).to(tl.int64)
        q += head * length * WIDTH
        out += head * length * WIDTH
        k += head // group * length * WIDTH
        v += head // group * length * WIDTH
        rows = tile * ROWS + tl.arange(0, ROWS)
        half = tl.arange(0, HALF)
        width = tl.arange(0, WIDTH)
        amplitude_q = tl.load(q + rows[:, None] * WIDTH + half[None, :])
        phase_q = tl.load(q + rows[:, None] * WIDTH + HALF + half[None, :])
        greatest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        sums = tl.zeros([ROWS, WIDTH], tl.float32)
        end = length
        if CAUSAL:
            end = (tile + 1) * ROWS
        for start in range(0, end, KEYS):
            keys = start + tl.arange(0, KEYS)
            amplitude_k = tl.load(k + keys[None, :] * WIDTH + half[:, None])
            phase_k = tl.load(k + keys[None, :] * WIDTH + HALF + half[:, None])
            amplitude = tl.dot(amplitude_q, amplitude_k) * scale
            phase = tl.dot(phase_q, phase_k) * turns_scale
            distance = tl.abs(rows[:, None] - keys[None, :]).to(tl.float32)
            # The tiny addend makes 0 to the power of alpha next to nothing; elsewhere f32 does not see it.
            power = tl.exp2(alpha * tl.inline_asm_elementwise(
                "lg2.approx.ftz.f32 $0, $1;", "=f,f", [distance + 1e-37],
                dtype=tl.float32, is_pure=True, pack=1,
            ))
            score = amplitude * cosine_of_turns(phase * power)
            if CAUSAL:
                if start + KEYS > tile * ROWS:
                    score = tl.where(rows[:, None] >= keys[None, :], score, float("-inf"))
            new = tl.maximum(greatest, tl.max(score, 1))
            kept = tl.exp2(greatest - new)
            weights = tl.exp2(score - new[:, None])
            total = total * kept + tl.sum(weights, 1)
            values = tl.load(v + keys[:, None] * WIDTH + width[None, :])
            sums = tl.dot(weights.to(values.dtype), values, sums * kept[:, None])
            greatest = new
        tl.store(out + rows[:, None] * WIDTH + width[None, :],
                 (sums / total[:, None]).to(out.dtype.element_ty))


def tapa(q, k, v, causal, tiles):
    """The Triton kernel's TAPA, alpha 0.1, halves of equal width."""
    rows, keys, warps, stages = tiles
    b, h, n, d = q.shape
    half = d // 2
    out = torch.empty_like(q)
    tapa_kernel[(n // rows, b * h)](
        q, k, v, out, n, math.log2(math.e) / math.sqrt(half), 1 / math.sqrt(half), 0.1,
        h // k.shape[1], d, half, causal, rows, keys, num_warps=warps, num_stages=stages,
    )
    return out


def bars():
    """The cases that the bars of training, the backward pass and TAPE's state need."""
    wanted = {shape_text(1, h, h, 16384, 16384, d, d, True) for h, d in ((16, 128), (32, 64))}
    dense = {shape_text(1, h, h, 8192, 8192, 128, 128, True) for h in (16, 4)}
    wide = shape_text(1, 16, 16, 8192, 8192, 128, 256, True)
    for bench, dtype, shape, _ in cases():
        kind = bench.split("/")[0]
        if (
            (bench in ("attend_bwd/plain", "attend_bwd/tapa_fast") and shape in wanted)
            or (bench in ("attend_fwd_bwd/tapa_fast", "attend_fwd_bwd/tapa_dense") and shape in dense)
            or (kind in ("attend_fwd", "attend_fwd_bwd") and shape == wide)
            or kind.startswith(("copy_x", "rotate", "tape_update", "train"))
        ):
            yield bench, dtype, shape


BARS = set(bars())


def run(options):
    ours = Ours(options.ours, options.samples)
    peers = Peers(options.samples)
    rows = []
    for bench, dtype, shape, names in cases():
        if options.only not in f"{bench} {dtype} {shape}":
            continue
        sizes, _ = parse_shape(shape)
        if options.quick and not (sizes["s"] in (16384, 131072) and sizes["h"] != 8):
            continue
        if options.bars and (bench, dtype, shape) not in BARS:
            continue
        times = {}
        for _ in range(options.rounds):
            row = ours.time(bench, dtype, shape)
            if row:
                times.setdefault(US, []).append(float(row["milliseconds"]))
            for name in names:
                try:
                    peer, milliseconds = peers.time(name, bench, dtype, shape)
                    times.setdefault(peer, []).append(milliseconds)
                except Exception as error:
                    text = str(error).splitlines()
                    print(f"{name}: {bench} {shape}: {text[0] if text else error}", file=sys.stderr)
                torch.cuda.empty_cache()
        own = statistics.median(times[US]) if US in times else None
        for peer, all_rounds in times.items():
            milliseconds = statistics.median(all_rounds)
            speed, unit = rate(bench, shape, milliseconds)
            ratio = f"{milliseconds / own:.3f}" if own and peer != US else ""
            rows.append([bench, peer, peers.gpu.replace(",", " "), dtype, shape,
                         f"{milliseconds:.4f}", f"{speed:.4f}", unit, ratio])
            print(",".join(rows[-1]), flush=True)
        write(options.out, rows)
    ours.close()
    return rows


def write(path, rows):
    if path:
        with open(path, "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(HEADER)
            writer.writerows(rows)


def judge(rows):
    """Prints our speed beside the peers', then the bars."""
    table = {}
    for bench, peer, _, dtype, shape, milliseconds, speed, unit, _ in rows:
        entry = table.setdefault((bench, dtype, shape), {})
        entry[peer] = (float(milliseconds), float(speed), unit)
    print(f"\n{'':22} {'':4} {'shape':44} {'ours':>8} {'unit':8} our speed over the peers'")
    for (bench, dtype, shape), entry in table.items():
        if US not in entry:
            continue
        own = entry[US]
        others = ", ".join(
            f"{peer} {other[1]:.2f}: {own[1] / other[1]:.2f}x"
            for peer, other in entry.items() if peer != US
        )
        name = bench.replace("attend_", "")
        print(f"{name:22} {dtype:4} {shape:44} {own[1]:8.2f} {own[2]:8} {others}")

    def speed(bench, shape, peer=US):
        entry = table.get((bench, "bf16", shape), {})
        return next((entry[name][1] for name in entry if name.startswith(peer)), None)

    square = lambda h, d, n: shape_text(max(1, 16384 // n), h, h, n, n, d, d, True)
    decode = shape_text(1, 32, 8, 1, 131072, 128, 128, True)
    copy = speed("copy", decode)
    bars = [
        ("TAPA fast, D=128 H16, 16k, TFLOP/s", speed("attend_fwd/tapa_fast", square(16, 128, 16384)), 200, 230),
        ("TAPA fast, D=64 H32, 16k, TFLOP/s", speed("attend_fwd/tapa_fast", square(32, 64, 16384)), 150, 175),
    ]
    for h, d in ((16, 128), (32, 64)):
        for n in (2048, 8192, 16384, 32768):
            own = speed("attend_fwd/plain", square(h, d, n))
            other = speed("attend_fwd/plain", square(h, d, n), "torch-fa2")
            over = own / other if own and other else None
            bars.append((f"plain over FlashAttention-2, D={d} H{h}, {n}", over, 0.85, None))
    for score in ("plain", "tapa_precise"):
        own = speed(f"attend_decode/{score}", decode)
        over = own / copy if own and copy else None
        bars.append((f"decode {score}, 131072 keys, over the copy's bandwidth", over, 0.70, None))
    def time_of(bench, shape, peer=US):
        entry = table.get((bench, "bf16", shape), {})
        return next((entry[name][0] for name in entry if name.startswith(peer)), None)

    def over(one, other):
        return one / other if one and other else None

    for h, d, least in ((16, 128, 150), (32, 64, 110)):
        name = f"TAPA backward, D={d} H{h}, 16k, TFLOP/s"
        bars.append((name, speed("attend_bwd/tapa_fast", square(h, d, 16384)), least, None))
        for peer in ("torch-fa2", "torch-cudnn"):
            own, other = (speed("attend_bwd/plain", square(h, d, 16384), who) for who in (US, peer))
            bars.append((f"plain backward over {peer}'s, D={d} H{h}, 16k", over(own, other), 0, None))
    for heads in (16, 4):
        shape = shape_text(1, heads, heads, 8192, 8192, 128, 128, True)
        dense, fused = (time_of(f"attend_fwd_bwd/{score}", shape) for score in ("tapa_dense", "tapa_fast"))
        if dense or heads == 4:
            name = f"TAPA forward and backward over the dense path, 8k H{heads}"
            bars.append((name, over(dense, fused), 15, None))
            break
    large = shape_text(1, 16, 16, 65536, 65536, 128, 128, True)
    for pass_of, by in (("fwd", "rope"), ("bwd", "rope"), ("fwd", "tape"), ("bwd", "tape")):
        value = over(speed(f"rotate_{pass_of}/{by}", large), speed("copy_x", large))
        name = f"rotate {pass_of} by {by} over the copy's bandwidth, 256 MB"
        bars.append((name, value, 0.80 if by == "rope" else 0, None))
    wide = shape_text(1, 16, 16, 8192, 8192, 128, 256, True)
    for pass_of in ("fwd", "fwd_bwd"):
        attention, update = time_of(f"attend_{pass_of}/tape", wide), time_of(f"tape_update_{pass_of}", wide)
        bars.append((f"attention over TAPE's update of the state, {pass_of}, 8k", over(attention, update), 10, None))
    model = shape_text(64, 6, 6, 512, 512, 64, 64, True)
    for encoding in ("rope", "alibi", "tapa", "tape"):
        bench = f"train_step/{encoding}"
        value = over(time_of(bench, model, "torch-step"), time_of(bench, model))
        name = f"training step over the torch model's, {encoding}"
        bars.append((name, value, 1 if encoding in ("rope", "tapa") else 0, None))
    print(f"\n{'bar':55} {'measured':>9} {'at least':>9} {'goal':>6}")
    failed = 0
    for name, value, least, goal in bars:
        if value is None:
            verdict, shown = "not measured", "-"
        else:
            verdict, shown = ("ok" if value >= least else "MISSED"), f"{value:.2f}"
            if goal and value >= goal:
                verdict += ", goal met"
        failed += verdict == "MISSED"
        print(f"{name:55} {shown:>9} {least:>9} {goal or '':>6}  {verdict}")
    return failed


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ours", help="benches/cuda.rs, built")
    parser.add_argument("--out", help="CSV to write")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--only", default="", help="only cases whose line contains this")
    parser.add_argument("--quick", action="store_true", help="16,384 tokens and the longest decoding alone")
    parser.add_argument("--bars", action="store_true", help="only what the bars of training need")
    parser.add_argument("--join", nargs="+", help="files to print the table of")
    options = parser.parse_args()
    if options.join:
        rows = []
        for path in options.join:
            with open(path, newline="") as file:
                lines = (line for line in file if not line.startswith("#"))
                rows += [row for row in csv.reader(lines) if row and row != HEADER]
    elif torch is None:
        parser.error("torch is not installed")
    elif options.ours and os.path.exists(options.ours):
        rows = run(options)
    else:
        parser.error("--ours PROGRAM or --join FILE is needed")
    sys.exit(1 if judge(rows) else 0)


if __name__ == "__main__":
    main()
