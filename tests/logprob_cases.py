"""Log-probs by the fused kernels and by plain PyTorch, against float64.

TRITON_INTERPRET=1 python -m tests.logprob_cases     # the kernels, interpreted on a CPU
"""

from __future__ import annotations

import torch

from moe_rl.models.logprobs import label_logprobs
from tests.attention_cases import check


def errors(
    tokens: int, vocabulary: int, width: int, chunk: int, temperature: float, dtype=torch.float32, device="cpu"
) -> dict[str, tuple[float, float]]:
    """Of log-probs, entropy and both gradients: plain's and fused's distance from float64, as a share of its norm."""
    generator = torch.Generator(device).manual_seed(tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    inputs = [normal(tokens, width).to(dtype), (normal(vocabulary, width) * 3 * width**-0.5).to(dtype)]
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator, device=device)
    grad = normal(tokens)

    def results(of, cast: torch.dtype) -> list[torch.Tensor]:
        leaves = [t.detach().to(cast).requires_grad_() for t in inputs]
        logprobs, entropy = of(*leaves)
        return [logprobs.detach(), entropy.detach(), *torch.autograd.grad(logprobs, leaves, grad.to(logprobs.dtype))]

    def exact(hidden, weight):
        every = (hidden @ weight.t() / temperature).log_softmax(-1)
        return every.gather(1, labels[:, None])[:, 0], -(every.exp() * every).sum(-1)

    def ours(fused):
        return lambda h, w: label_logprobs(h, w, labels, temperature, chunk, True, fused=fused)

    wanted, slow, fast = results(exact, torch.float64), results(ours(False), dtype), results(ours(True), dtype)
    names = ("logprobs", "entropy", "hidden", "weight")
    return {
        name: tuple(float((t.double() - w).norm() / w.norm()) for t in pair)  # type: ignore[misc]
        for name, w, *pair in zip(names, wanted, slow, fast, strict=True)
    }


def main() -> None:
    for sizes in ((5, 61, 8, 2, 1.0), (3, 40, 16, 7, 0.6)):
        found = errors(*sizes)
        print(*(f"{name} {slow:.1e} {fast:.1e}" for name, (slow, fast) in found.items()), sep="; ")
        check(found)


if __name__ == "__main__":
    main()
