"""GRPO's formulas against numbers worked by hand, against numpy, and against each other however a batch is cut."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_rl.grpo import kl
from moe_rl.grpo.advantages import group_advantages
from moe_rl.grpo.aggregation import sample_weights, token_weights
from moe_rl.grpo.losses import policy_loss
from moe_rl.grpo.mismatch import mismatch


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


class TestAdvantages:
    def test_hand_worked(self):
        got = group_advantages(tensor(1, 0, 0, 0), 4)
        np.testing.assert_allclose(got.values, [1.5, -0.5, -0.5, -0.5], rtol=1e-5)
        np.testing.assert_allclose(group_advantages(tensor(1, 0), 2).values, [2**-0.5, -(2**-0.5)], rtol=1e-5)
        plain = group_advantages(tensor(1, 0, 0, 0, 2, 4, 2, 4), 4, "group_mean")
        np.testing.assert_allclose(plain.values, [0.75, -0.25, -0.25, -0.25, -1, 1, -1, 1])
        assert got.zero_variance_groups == plain.zero_variance_groups == 0
        assert got.values.dtype == torch.float32

    def test_equal_rewards_give_exactly_zero(self):
        # in fp32 the mean of three 0.1 is not 0.1: the rounding over 1e-6 would be an advantage of 0.007
        r = torch.full((6,), 0.1)
        r[3:] = torch.tensor([0.0, 1.0, 0.0])
        got = group_advantages(r, 3)
        assert got.values[:3].tolist() == [0, 0, 0] and got.values[3:].abs().min() > 0.5
        assert got.zero_variance_groups == 1

    def test_masked_samples_leave_the_statistics(self):
        # group 1 is (1, 0, -, 0) with an aborted sample that carries NaN; group 2 has one sample left, group 3 none
        nan = math.nan
        r = tensor(1, 0, nan, 0, 5, nan, nan, nan, nan, nan, nan, nan)
        valid = torch.tensor([1, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0], dtype=torch.bool)
        got = group_advantages(r, 4, "group_mean", valid)
        np.testing.assert_allclose(got.values, [2 / 3, -1 / 3, 0, -1 / 3] + [0] * 8, rtol=1e-6)
        assert got.zero_variance_groups == 2
        std = math.sqrt((4 / 9 + 1 / 9 + 1 / 9) / 2)
        with_std = group_advantages(r, 4, "group_std", valid).values
        np.testing.assert_allclose(with_std[:4], np.array([2 / 3, -1 / 3, 0, -1 / 3]) / (std + 1e-6), rtol=1e-6)

    @settings(max_examples=50, deadline=None)
    @given(st.integers(2, 6), st.integers(1, 5), st.integers(0, 2**32 - 1))
    def test_against_numpy(self, n, groups, seed):
        rng = np.random.default_rng(seed)
        r = rng.integers(-2, 3, (groups, n)) * 0.3
        valid = rng.random((groups, n)) < 0.8
        got = group_advantages(torch.from_numpy(r.ravel()), n, "group_std", torch.from_numpy(valid.ravel()))
        zero = 0
        for g in range(groups):
            kept = r[g][valid[g]]
            expect = np.zeros(n)
            if len(kept) < 2 or len(set(kept)) == 1:
                zero += 1
            else:
                expect[valid[g]] = (kept - kept.mean()) / (kept.std(ddof=1) + 1e-6)
            np.testing.assert_allclose(got.values.view(groups, n)[g], expect, rtol=2e-5, atol=1e-7)
        assert got.zero_variance_groups == zero

    def test_refuses(self):
        for args in ((tensor(1, 2, 3), 2), (tensor(1, 2), 1), (tensor(1, math.inf), 2), (tensor(1, 2), 2, "median")):
            with pytest.raises(ValueError):
                group_advantages(*args)


class TestPolicyLoss:
    # ratio, advantage, loss, d loss / d logp, clipped: bounds 0.8 and 1.3, dual clip 3
    CASES = [
        (1.0, 2.0, -2.0, -2.0, False),
        (1.2, 1.0, -1.2, -1.2, False),
        (1.5, 1.0, -1.3, 0.0, True),
        (0.5, 1.0, -0.5, -0.5, False),
        (0.5, -1.0, 0.8, 0.0, True),
        (1.5, -1.0, 1.5, 1.5, False),
        (2.9, -1.0, 2.9, 2.9, False),
        (4.0, -1.0, 3.0, 0.0, True),
        (4.0, 0.0, 0.0, 0.0, False),
    ]

    def test_hand_worked(self):
        ratio, adv, loss, grad, clipped = (torch.tensor(c, dtype=torch.float64) for c in zip(*self.CASES, strict=True))
        old = torch.full_like(ratio, -1.5)
        logp = (old + ratio.log()).requires_grad_()
        got = policy_loss(logp, old, adv, 0.2, 0.3, 3.0)
        got.loss.sum().backward()
        np.testing.assert_allclose(got.loss.detach(), loss, atol=1e-12)
        np.testing.assert_allclose(logp.grad, grad, atol=1e-12)
        assert got.clipped.tolist() == clipped.bool().tolist()

    def test_without_dual_clip_a_negative_advantage_is_unbounded(self):
        got = policy_loss(tensor(math.log(4)), tensor(0), tensor(-1), 0.2, 0.3, 0.0)
        assert got.loss.item() == pytest.approx(4.0) and not got.clipped.item()

    def test_no_gradient_into_old_or_advantages(self):
        logp, old, adv = (torch.randn(5, requires_grad=True) for _ in range(3))
        policy_loss(logp, old, adv).loss.sum().backward()
        assert logp.grad is not None and old.grad is None and adv.grad is None

    def test_a_huge_log_ratio_stays_finite(self):
        logp = torch.tensor([500.0, 500.0, -500.0], requires_grad=True)
        got = policy_loss(logp, torch.zeros(3), torch.tensor([1.0, -1.0, 1.0]), 0.2, 0.2, 3.0)
        got.loss.sum().backward()
        assert torch.isfinite(got.loss).all() and torch.isfinite(logp.grad).all()

    def test_refuses(self):
        with pytest.raises(ValueError):
            policy_loss(tensor(0), tensor(0, 0), tensor(1))
        for bounds in ((-0.1, 0.2, 0.0), (0.2, -0.1, 0.0), (0.2, 0.2, 0.5)):
            with pytest.raises(ValueError):
                policy_loss(tensor(0), tensor(0), tensor(1), *bounds)


class TestKL:
    def test_hand_worked(self):
        logp, ref = tensor(math.log(0.5), math.log(0.1)), tensor(math.log(0.25), math.log(0.2))
        d = math.log(2)
        np.testing.assert_allclose(kl.k1(logp, ref), [d, -d])
        np.testing.assert_allclose(kl.k2(logp, ref), [d * d / 2, d * d / 2])
        np.testing.assert_allclose(kl.k3(logp, ref), [0.5 - 1 + d, 2 - 1 - d])

    def test_expectations_and_gradients_over_a_whole_vocabulary(self):
        # exact sums over 7 tokens: E[k1] = E[k3] = KL(p||r); E[grad k2] = grad KL(p||r); E[grad k3] = grad KL(r||p)
        torch.manual_seed(0)
        logits = torch.randn(7, dtype=torch.float64, requires_grad=True)
        r = torch.randn(7, dtype=torch.float64).log_softmax(0)
        logp = logits.log_softmax(0)
        p = logp.exp().detach()
        forward = (logp.exp() * (logp - r)).sum()
        for estimate in (kl.k1, kl.k3):
            assert (p * estimate(logp, r)).sum().item() == pytest.approx(forward.item())

        def grad(value: torch.Tensor) -> np.ndarray:
            return torch.autograd.grad(value, logits, retain_graph=True)[0].numpy()

        np.testing.assert_allclose(grad((p * kl.k1(logp, r)).sum()), 0, atol=1e-12)
        np.testing.assert_allclose(grad((p * kl.k2(logp, r)).sum()), grad(forward), atol=1e-12)
        np.testing.assert_allclose(grad((p * kl.k3(logp, r)).sum()), grad((r.exp() * (r - logp)).sum()), atol=1e-12)

    def test_loss_term_knows_k2_and_k3_only(self):
        logp, ref = tensor(-1.0), tensor(-1.5)
        assert kl.loss_term("k2", logp, ref).item() == pytest.approx(0.125)
        assert kl.loss_term("k3", logp, ref).item() == pytest.approx(math.exp(-0.5) - 0.5)
        for kind in ("k1", "none"):
            with pytest.raises(ValueError, match=kind):
                kl.loss_term(kind, logp, ref)

    def test_k3_of_far_tokens_is_finite(self):
        assert torch.isfinite(kl.k3(torch.tensor([-900.0]), torch.tensor([-1.0]))).all()

    def test_penalised_rewards(self):
        logp, ref = tensor(-1.0, -2.0, -0.3), tensor(-1.5, -1.9, -1.3)
        got = kl.penalised_rewards(tensor(1, 0, 2), logp, ref, torch.tensor([2, 0, 1]), 0.1)
        np.testing.assert_allclose(got, [1 - 0.1 * 0.4, 0, 2 - 0.1 * 1.0])
        with pytest.raises(ValueError):
            kl.penalised_rewards(tensor(1), logp, ref, torch.tensor([2]), 0.1)


class TestAggregation:
    def test_hand_worked(self):
        lengths = torch.tensor([1, 3])
        np.testing.assert_allclose(token_weights(lengths), [0.25] * 4)
        np.testing.assert_allclose(token_weights(lengths, "sequence_mean"), [1 / 2, 1 / 6, 1 / 6, 1 / 6])
        masked = torch.tensor([4, 1, 0, 3])
        valid = torch.tensor([False, True, True, True])
        np.testing.assert_allclose(sample_weights(masked, "token_mean", valid), [0, 0.25, 0, 0.25])
        np.testing.assert_allclose(sample_weights(masked, "sequence_mean", valid), [0, 1 / 2, 0, 1 / 6])

    def test_is_the_mean_it_says(self):
        torch.manual_seed(0)
        losses = [torch.randn(n, dtype=torch.float64) for n in (5, 1, 8, 2)]
        lengths = torch.tensor([len(x) for x in losses])
        flat = torch.cat(losses)
        assert (token_weights(lengths) * flat).sum().item() == pytest.approx(flat.mean().item())
        by_sequence = (token_weights(lengths, "sequence_mean") * flat).sum().item()
        assert by_sequence == pytest.approx(np.mean([x.mean().item() for x in losses]))

    @pytest.mark.parametrize("mode", ["token_mean", "sequence_mean"])
    def test_nothing_valid_is_zero_and_finite(self, mode):
        for lengths, valid in ((torch.tensor([3, 2]), torch.zeros(2, dtype=torch.bool)), (torch.tensor([0, 0]), None)):
            assert sample_weights(lengths, mode, valid).tolist() == [0, 0]

    def test_refuses(self):
        with pytest.raises(ValueError):
            sample_weights(torch.tensor([1]), "mean")
        with pytest.raises(ValueError):
            sample_weights(torch.tensor([-1]))

    @settings(max_examples=30, deadline=None)
    @given(st.integers(0, 2**31), st.sampled_from(["token_mean", "sequence_mean"]))
    def test_loss_and_gradient_do_not_depend_on_the_cut(self, seed, mode):
        """The whole loss (clip, dual clip, k3, weights) at once, and cut at random into parts that are summed."""
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, 9, (6,), generator=generator)
        valid = torch.rand(6, generator=generator) > 0.2
        total = int(lengths.sum())
        theta = torch.randn(total, generator=generator, dtype=torch.float64).requires_grad_()
        old, ref = torch.randn(2, total, generator=generator, dtype=torch.float64)
        adv = torch.repeat_interleave(torch.randn(6, generator=generator, dtype=torch.float64), lengths)
        weights = token_weights(lengths, mode, valid)

        def loss(tokens: torch.Tensor) -> torch.Tensor:
            policy = policy_loss(theta[tokens], old[tokens], adv[tokens], 0.2, 0.3, 3.0).loss
            return (weights[tokens] * (policy + 0.1 * kl.k3(theta[tokens], ref[tokens]))).sum()

        whole = loss(torch.arange(total))
        (expected,) = torch.autograd.grad(whole, theta)
        owner = torch.repeat_interleave(torch.randint(0, 3, (6,), generator=generator), lengths)
        parts = [loss(torch.nonzero(owner == part).flatten()) for part in range(3)]
        for part in parts:
            part.backward()
        assert sum(part.item() for part in parts) == pytest.approx(whole.item(), rel=1e-12, abs=1e-14)
        np.testing.assert_allclose(theta.grad, expected, rtol=1e-12, atol=1e-14)


class TestMismatch:
    def test_hand_worked(self):
        # p = (.5, .25), q = (.25, .5): perfectly opposed; log ratios +-log 2; k3 = ((2-1-ln2) + (.5-1+ln2)) / 2
        got = mismatch(tensor(math.log(0.5), math.log(0.25)), tensor(math.log(0.25), math.log(0.5)))
        assert got["mismatch/pearson_prob"] == pytest.approx(-1)
        assert got["mismatch/k3_kl"] == pytest.approx(0.25)
        assert got["mismatch/logprob_abs_max"] == pytest.approx(math.log(2))

    def test_against_numpy(self):
        rng = np.random.default_rng(0)
        q = -rng.exponential(1.0, 200)
        p = q + rng.normal(0, 0.05, 200)
        got = mismatch(torch.from_numpy(p), torch.from_numpy(q))
        assert got["mismatch/pearson_prob"] == pytest.approx(np.corrcoef(np.exp(p), np.exp(q))[0, 1])
        assert got["mismatch/k3_kl"] == pytest.approx(np.mean(np.exp(p - q) - 1 - (p - q)))

    def test_k3_estimates_rollout_against_trainer(self):
        # tokens sampled from q: the mean must come near KL(q || p), which here is far from KL(p || q)
        rng = np.random.default_rng(1)
        q, p = np.array([0.9, 0.09, 0.01]), np.array([0.6, 0.1, 0.3])
        x = rng.choice(3, 200_000, p=q)
        got = mismatch(torch.from_numpy(np.log(p)[x]), torch.from_numpy(np.log(q)[x]))["mismatch/k3_kl"]
        assert got == pytest.approx((q * np.log(q / p)).sum(), rel=0.02)
        assert abs(got - (p * np.log(p / q)).sum()) > 0.3

    def test_constant_probabilities(self):
        sure = torch.zeros(5)
        assert mismatch(sure, sure)["mismatch/pearson_prob"] == 1.0
        noise = torch.tensor([0.0, -1e-6, 0.0, -2e-6, 0.0])
        assert mismatch(sure, noise)["mismatch/pearson_prob"] == 1.0
        assert mismatch(sure, sure - 1)["mismatch/pearson_prob"] == 0.0
        assert mismatch(sure, tensor(0, -1, -2, 0, -1).float())["mismatch/pearson_prob"] == 0.0
        assert mismatch(tensor(-0.7), tensor(-0.7))["mismatch/pearson_prob"] == 1.0

    def test_no_token_and_not_finite(self):
        assert mismatch(torch.empty(0), torch.empty(0)) == {}
        assert all(math.isnan(v) for v in mismatch(tensor(-1, -math.inf), tensor(-1, -2)).values())
        with pytest.raises(ValueError):
            mismatch(torch.zeros(2), torch.zeros(3))


def test_samples_without_a_reward_are_in_no_sum():
    from moe_rl.config import Config
    from moe_rl.trainer.losses import grpo_loss

    fields = {
        "mask": tensor(1, 1, 0),
        "weight": tensor(0.5, 0.5, 0),
        "advantage": tensor(1, -1, 0),
        "old_logprob": tensor(-1.0, -2.0, -7.0),
        "reference_logprob": tensor(0, 0, 0),
    }
    _, sums = grpo_loss(Config().algorithm)(tensor(-1.25, -2.0, -7.5), tensor(0.1, 0.2, 9.0), fields)
    found = {name: float(value) for name, value in sums.items()}
    assert found == pytest.approx({"tokens": 2, "clipped": 0, "entropy": 0.3, "kl_old": 0.25})
