"""The model is the user's: whatever locant did to read it is gone when the call ends, however it ends."""

import threading

import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack as function_modes

import families
import locant
from families import loaded, token_ids

HOOKS = [name for name in vars(nn.Linear(1, 1)) if name.endswith("_hooks") or "_hooks_" in name]
EVERYTHING = ["embeddings", "query_rotated.0", "attn_probs.1", "attn_scores.1", "mlp_act.1", "z.2", "logits"]


def fingerprint(hf: nn.Module) -> dict[str, object]:
    """Everything of a model, and of torch, that a capture could leave changed."""
    found: dict[str, object] = {
        "config": hf.config.to_dict(),
        "attention": hf.config._attn_implementation,
        "modes": len(function_modes()),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "forward": [m.forward.__func__ for m in hf.modules()],
        "modules": [type(m) for m in hf.modules()],
    }
    for path, module in hf.named_modules():
        found[path, "training"] = module.training
        found[path, "hooks"] = [list(getattr(module, name)) for name in HOOKS]
        found[path, "attributes"] = sorted(vars(module))
    for path, weight in [*hf.named_parameters(), *hf.named_buffers()]:
        found[path, "flags"] = weight.requires_grad, weight.grad is None, weight._version
        found[path, "sum"] = float(weight.detach().double().sum())
    return found


def change_things(hf: nn.Module) -> None:
    """Settings of a user's own, none of them a default."""
    hf.train()
    hf.model.layers[1].mlp.eval()
    hf.model.layers[0].self_attn.q_proj.weight.requires_grad_(False)
    hf.model.norm.register_forward_hook(lambda _, __, out: out)


def refused(model: locant.EagerModel, prompt: object, address: str) -> None:
    with pytest.raises(locant.LocantError):
        model.capture(prompt, address)


CALLS = {
    "capture": lambda m: m.capture(token_ids(), EVERYTHING),
    "a ragged batch": lambda m: m.capture([[5, 6, 7], [8]], EVERYTHING),
    "one position": lambda m: m.capture(token_ids(), EVERYTHING, positions=-1),
    "stopping early": lambda m: m.capture(token_ids(), "attn_probs.0"),
    "with gradients": lambda m: m.capture(token_ids(), EVERYTHING, grad=True)["logits"].sum().backward(),
    "run_with_cache": lambda m: m.run_with_cache(token_ids(), EVERYTHING),
    "unembed": lambda m: m.unembed(torch.ones(1, 2, families.WIDTH)),
    "points": lambda m: (m.points().rows(), repr(m.points()), m.refuses("resid_post.9")),
    "a refused address": lambda m: refused(m, token_ids(), "router_logits.1"),
    "a refused prompt": lambda m: refused(m, [999], "resid_post.1"),
    "loading again": lambda m: locant.load_model(m.hf),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_call_leaves_the_model_as_it_was(call, attention):
    hf = families.fresh("llama", attention)
    change_things(hf)
    before = fingerprint(hf)
    model = locant.load_model(hf)
    assert fingerprint(hf) == before
    CALLS[call](model)
    assert fingerprint(hf) == before


class Interrupted(BaseException):
    pass


def raising(error: type[BaseException]):
    def hook(*_: object) -> None:
        raise error("in the middle")

    return hook


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, Interrupted, StopIteration])
@pytest.mark.parametrize("where", ["model.layers.1", "model.layers.1.self_attn.o_proj", "model.layers.1.self_attn"])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_failure_in_the_middle_comes_through_and_leaves_nothing(error, where, grad, attention):
    hf = families.fresh("llama", attention)
    change_things(hf)
    model = locant.load_model(hf)
    before = fingerprint(hf)
    wanted = model.capture(token_ids(), EVERYTHING)
    hook = hf.get_submodule(where).register_forward_hook(raising(error))
    with pytest.raises(error, match="in the middle"):
        model.capture(token_ids(), [*EVERYTHING, "model.layers.1.self_attn"], grad=grad)
    hook.remove()
    assert fingerprint(hf) == before
    for address, tensor in model.capture(token_ids(), EVERYTHING).items():
        assert torch.equal(tensor, wanted[address])


@pytest.mark.parametrize(("error", "told"), [(ValueError, locant.ModelError), (KeyboardInterrupt, KeyboardInterrupt)])
def test_a_failure_while_loading_leaves_nothing(error, told):
    hf = families.fresh("llama")
    change_things(hf)
    hook = hf.model.layers[1].register_forward_hook(raising(error))
    before = fingerprint(hf)
    with pytest.raises((error, locant.ModelError), match="in the middle"):
        locant.load_model(hf)
    assert fingerprint(hf) == before
    hook.remove()
    assert locant.load_model(hf).refuses("resid_post.1") is None


def test_hooks_of_the_users_stay_and_what_they_change_is_what_is_captured():
    model = locant.load_model(families.fresh("llama"))
    plain = model.capture(token_ids(), ["resid_post.0", "resid_pre.1", "resid_post.1"])
    seen = []
    hook = model.hf.model.layers[0].register_forward_hook(lambda _, __, out: seen.append(1) or out + 1)
    steered = model.capture(token_ids(), ["resid_post.0", "resid_pre.1", "resid_post.1"])
    assert len(seen) == 1
    assert torch.equal(steered["resid_post.0"], plain["resid_post.0"] + 1)
    assert torch.equal(steered["resid_pre.1"], steered["resid_post.0"])
    assert not torch.equal(steered["resid_post.1"], plain["resid_post.1"])
    with torch.no_grad():
        own = model.hf(token_ids(), use_cache=False).logits
    assert len(seen) == 2
    assert torch.equal(model.run_with_cache(token_ids(), "attn_probs.1")[0], own)
    hook.remove()
    assert torch.equal(model.capture(token_ids(), "resid_post.1")["resid_post.1"], plain["resid_post.1"])


def test_a_users_change_of_an_input_is_captured_too():
    model = locant.load_model(families.fresh("llama"))
    plain = model.capture(token_ids(), "mlp_act.1")["mlp_act.1"]
    hook = model.hf.model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    doubled = model.capture(token_ids(), "mlp_act.1")["mlp_act.1"]
    hook.remove()
    assert torch.equal(doubled, plain * 2)


def test_a_model_in_training_is_read_without_dropout():
    hf = families.fresh("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    wanted = locant.load_model(hf).capture(token_ids(), ["resid_post.2", "attn_probs.1"])
    hf.train()
    model = locant.load_model(hf)
    for address, tensor in model.capture(token_ids(), list(wanted)).items():
        assert torch.equal(tensor, wanted[address])
    assert all(module.training for module in hf.modules())


def test_another_attention_implementation_is_noticed():
    hf = families.fresh("llama", "sdpa")
    model = locant.load_model(hf)
    ids, names = token_ids(), ["attn_probs.1", "query_rotated.1", "z.1"]
    before = model.capture(ids, names)
    hf.set_attn_implementation("eager")
    for options in ({}, {"positions": -1}, {"positions": [0, 2]}, {"grad": True}):
        cache = model.capture(ids, names, **options)
        assert cache.origin.attention == "eager"
    assert torch.allclose(model.capture(ids, names)["attn_probs.1"], before["attn_probs.1"], atol=1e-6)
    assert hf.config._attn_implementation == "eager"
    hf.set_attn_implementation("sdpa")
    assert torch.equal(model.capture(ids, names)["attn_probs.1"], before["attn_probs.1"])


def test_a_change_of_the_weights_shows_in_the_next_capture():
    hf = families.fresh("llama")
    model = locant.load_model(hf)
    before = model.capture(token_ids(), "resid_post.0")["resid_post.0"]
    with torch.no_grad():
        hf.model.embed_tokens.weight.add_(1)
    assert not torch.equal(model.capture(token_ids(), "resid_post.0")["resid_post.0"], before)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_threads_that_capture_on_one_model_get_the_values_of_one_thread(attention):
    model = loaded("llama", attention)
    asked = [(token_ids(seed=n, length=3 + n), EVERYTHING[n % 3 :]) for n in range(6)]
    wanted = [model.capture(ids, names) for ids, names in asked]
    wrong: list[str] = []

    def work(mine: int) -> None:
        for turn in range(8):
            n = (mine + turn) % len(asked)
            ids, names = asked[n]
            cache = model.capture(ids, names)
            wrong.extend(f"{a} of {n}" for a, t in cache.items() if not torch.equal(t, wanted[n][a]))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not function_modes()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_forward_of_the_users_own_in_another_thread_is_neither_read_nor_stopped(attention):
    model = locant.load_model(families.fresh("llama", attention))
    ids = token_ids(seed=1, length=5)
    wanted = model.capture(ids, EVERYTHING)
    own = token_ids(seed=2, length=8)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return model.hf(own, use_cache=False).logits

    logits = forward()
    done = threading.Event()
    wrong: list[str] = []

    def serve() -> None:
        while not done.is_set():
            try:
                if not torch.equal(forward(), logits):
                    wrong.append("other logits")
            except BaseException as error:  # noqa: BLE001 - whatever reached the user's thread
                wrong.append(repr(error))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        for _ in range(40):
            for address, tensor in model.capture(ids, EVERYTHING[:-1]).items():
                if not torch.equal(tensor, wanted[address]):
                    wrong.append(str(address))
    finally:
        done.set()
        thread.join()
    assert not wrong
