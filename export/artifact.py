"""Artifact: a trained drafter, its tree and its provenance, in one folder without a pickle.

config.json, model.safetensors and README.md depend only on the training: two equal runs write equal bytes. tuning.json
holds measurements of one machine."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..modules import Adapter, Drafter, Policy, Proposer, Target, TargetIdentity, Topology, UserError
from ..modules.baselines.registry import JOINED, PolicyName, joined_drafter, joined_policy, parse_joined, with_reference
from ..modules.decoding.answers import drafted_generate
from ..modules.decoding.recorded_rounds import MOST_KEPT
from ..modules.files.atomic_files import file_sha256, write_file
from ..modules.files.folders import whole_folder
from ..modules.files.json_records import typed_fields
from ..modules.policies import registry as policies
from ..modules.policies.registry import FASTEST, MOST, NONE, PAID, SPARSE, STATIC, policy_named
from ..modules.policies.stopping_chains import RejectionRisk
from ..modules.target.loading.loading import is_local
from ..modules.tuning.acceptance_examples import chain_for
from ..modules.tuning.trials import SIZING_TEMPERATURE
from . import measured_files
from .acceptance_heads import StoredHead, load_heads, temperature_name
from .measured_files import PLAIN, Prediction, Tuning, read_tuning
from .model_card import model_card
from .stored_drafter import ACCEPTANCE, AGAIN, CARD, CHANGING, CONFIG, FORMAT_VERSION, WEIGHTS, as_json, load_drafter


class Drafting(NamedTuple):
    """A drafter and the policy that grows its trees, to decode with."""

    drafter: Proposer
    policy: Policy


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """A drafter with the target that verifies its drafts, ready to decode."""

    drafter: Drafter  # The drafter, bound to `target`
    target: Target
    """The verifying target: the one it was loaded for, or a copy of it with `adapter` merged into its weights."""
    topology: Topology  # The static tree in best-first order: any prefix of it is the best smaller tree
    identity: TargetIdentity  # Identity of the target it was trained for
    provenance: dict[str, Any]  # Recipe, hash of the data manifest, measured acceptance, versions
    tuning: Tuning | None = None  # Measurements of this machine; None if there are none
    adapter: Adapter | None = None  # Changes of the target's weights; None if the artifact leaves the target unchanged
    heads: Mapping[float, StoredHead] = field(default_factory=dict)
    """Acceptance heads by the temperature that they are calibrated for."""
    acceptance: Mapping[str, Any] = field(default_factory=dict)  # acceptance.json; empty where nothing was written
    shared: bool = False  # Whether the target is another than its own, as a draft language model's may be
    weights_sha256: str = ""
    """Hash of the file of weights, by which exports and evaluations name it; empty for one that no folder holds."""
    _drafting: dict[tuple[str, int, float], Drafting] = field(  # By policy, rows and temperature of calls of `generate`
        default_factory=dict, init=False, repr=False, compare=False)

    @property
    def tree_size(self) -> int:
        """Nodes drafted by default for one greedy row, root included: the tuned size, else the whole tree."""
        return self.size_for(1)

    def prediction(self, name: str = STATIC, *, batch_size: int = 1, temperature: float = 0.0) -> Prediction | None:
        """Figures by seconds measured on this machine and held-out answers.

        None if nothing was measured here, the policy is none of those that were tried, or the rows are sampled at
        another temperature than SIZING_TEMPERATURE."""
        if self.tuning is None or temperature not in (0.0, SIZING_TEMPERATURE):
            return None
        return PLAIN if name in (NONE, f"{STATIC}-1") else self.tuning.prediction(name, batch_size, temperature)

    def size_for(self, batch_size: int, temperature: float = 0.0) -> int:
        """Nodes drafted by default for so many rows at once, root included; 1 where drafting does not pay."""
        whole = self.topology.size
        return whole if self.tuning is None else min(self.tuning.size_for(batch_size, temperature), whole)

    def fastest(self, *, batch_size: int = 1, temperature: float = 0.0) -> str:
        """The policy that is predicted to decode such rows fastest on this machine: static, static+lookup or none;
        static where nothing was measured."""
        return STATIC if self.tuning is None else self.tuning.fastest(batch_size, temperature)

    def drafting(self, name: str = FASTEST, *, batch_size: int = 1, temperature: float = 0.0) -> Drafting:
        """The drafter and the policy to decode with: by default what is predicted to be fastest, else as of `policy`.
        With a partner in the name, such as static+lookup, the drafter is an ensemble with a new one of that kind."""
        if name == FASTEST:
            name = self.fastest(batch_size=batch_size, temperature=temperature)
        policy = self.policy(name, batch_size=batch_size, temperature=temperature)
        return Drafting(joined_drafter(parse_joined(name), self.drafter, self.target), policy)

    def policy(self, name: str = STATIC, *, batch_size: int = 1, temperature: float = 0.0) -> Policy:
        """The policy to draft with: by default the artifact's tree, cut to `size_for(batch_size, temperature)` nodes.

        Other policies also take that many nodes, or that tree's depth, unless their name contains a number. One with a
        partner needs the drafter of `drafting`; static+lookup has the sizes that replays found to be the fastest. For
        sampled rows a policy without a number has no node but the root, which is plain decoding, unless drafting is
        predicted to be faster on this machine.

        Args:
            name: one of `modules.POLICIES`, with a number and a partner where you like: static-16, eagle2-32+lookup.
            batch_size: rows that are decoded at once.
            temperature: their sampling temperature; above 0 less is accepted, and smaller trees pay, or none.

        Raises:
            UserError: if there is no such policy or partner, it asks for more than the tree or the family has, or for
                an acceptance head that the artifact does not hold."""
        if name == JOINED and self.tuning is not None and self.tuning.trials(0.0, JOINED):
            # Tree and copied chain were tried together: no other tree goes with that chain.
            best = self.tuning.best(JOINED, batch_size, temperature)
            name = f"{STATIC}-1" if best is None else best.policy
        parts = parse_joined(name)
        return joined_policy(parts, self._own_policy(parts, batch_size, temperature), self.target)

    def generate(self, inputs: Tensor | None = None, *, streamer: Any = None, policy: str = FASTEST,
                 reference: str | Sequence[str] = (), **given: Any) -> Tensor:
        """The tokens that `generate` of transformers gives for the same call, drafted and verified, [B, L + T].

        Greedy answers are equal token by token, sampled ones in distribution; `torch.manual_seed` repeats them. It
        takes the arguments of `generate` (prompts padded on the left, lengths, sampling, penalty, end tokens, stop
        strings, a `generation_config`, a `streamer` for one prompt), a policy of `drafting`, and a `reference` that the
        answers may resemble, or one for each: a policy that ends in +reference copies from it, by default
        static+reference. What is not offered is refused by name: it raises UserError."""
        references = (reference,) if isinstance(reference, str) else tuple(reference)
        policy = with_reference(policy) if references else policy

        def drafting(*, batch_size: int, temperature: float) -> Drafting:
            # The same objects for the same rows: the target keeps what it has recorded of their rounds.
            wanted = policy, batch_size, temperature
            if wanted not in self._drafting:
                while len(self._drafting) >= MOST_KEPT:
                    del self._drafting[next(iter(self._drafting))]
                self._drafting[wanted] = self.drafting(policy, batch_size=batch_size, temperature=temperature)
            # A partner has read nothing, as a new one: sampled trees would depend on earlier calls.
            self._drafting[wanted].drafter.forget()
            return self._drafting[wanted]

        return drafted_generate(self.target, drafting, inputs, streamer, references, given)

    def _own_policy(self, name: PolicyName, batch_size: int, temperature: float) -> Policy:
        """The part of a policy that grows the artifact's own drafts."""
        kind, number = policies.parse_policy(name.own)
        if kind == policies.SPECDEC:
            if temperature not in self.heads:
                held = ", ".join(map(temperature_name, sorted(self.heads))) or "none"
                wanted = temperature_name(temperature)
                raise UserError(f"the policy {kind} needs an acceptance head for temperature {wanted}, this "
                                f"artifact holds heads for: {held}; train one with draftsmith specdec --temperatures "
                                f"'[{wanted}]', or choose another policy")
            rule = self.heads[temperature].rule
            risk = RejectionRisk(self.heads[temperature].head.log_acceptance, rule.setting, number or rule.threshold,
                                 rule.least)
            return chain_for(rule.setting, rule.most, risk)
        if kind == PAID:
            # It finds out by itself what pays: only a size that the recipe sets bounds it.
            asked = None if self.tuning is None or number is not None else self.tuning.used_nodes
            expected = self.provenance.get("expected_accepted_length", ())
            chances = [after - before for before, after in pairwise([0.0, *expected])]
            return policy_named(name.own, self.topology.prefix(min(asked or MOST, self.topology.size)), self.drafter,
                                chances if len(chances) >= self.topology.size else (),
                                None if self.tuning is None else self.tuning.cost.step_seconds)
        if number is not None or self.tuning is None:
            return policy_named(name.own, self.topology, self.drafter)
        # Virtual nodes are part of a pass: such trees have a size of their own.
        if kind == SPARSE and self.tuning.trials(0.0, SPARSE):
            best = self.tuning.best(SPARSE, batch_size, temperature)
            return policy_named(f"{STATIC}-1" if best is None else best.policy, self.topology, self.drafter)
        # Where no size is known to pay for sampled rows, every policy is plain decoding.
        size = self.size_for(batch_size, temperature)
        plain = size == 1 and temperature > 0 and kind != SPARSE
        return policy_named(STATIC if plain else name.own, self.topology.prefix(size), self.drafter)


def save_artifact(folder: Path, drafter: Drafter, identity: TargetIdentity, provenance: dict[str, Any],
                  topology: Topology, adapter: Adapter | None = None,
                  acceptance: Sequence[Mapping[str, Any]] = ()) -> Path:
    """Write config.json, model.safetensors, README.md and acceptance.json; the bytes of the first three depend only on
    the arguments and versions, the last keeps what evaluations of the same weights have counted.

    Absolute paths inside `provenance` are cut to their last part, which depends on no machine. An unchanged artifact
    in `folder` is replaced as a whole, its tuning and its acceptance heads included.

    Args:
        provenance: JSON-ready facts; `acceptance` ({accepted_length, by_position, tokens}), `data_manifest` and
            `recipe` are shown on the model card.
        topology: the tree, best node first.
        adapter: changes of the target's weights; `identity` is that of the unchanged target.
        acceptance: measurements for acceptance.json and the card.

    Raises:
        UserError: if a weight is not finite, or `folder` holds other files or cannot be written."""
    changes = {} if adapter is None else adapter.tensors()
    # Cloned: safetensors refuses tensors that share memory.
    weights = {name: tensor.detach().to("cpu", copy=True).contiguous()
               for name, tensor in {**drafter.state_dict(), **changes}.items()}
    for name, tensor in weights.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise UserError(f"the weight {name} holds values that are not finite: training diverged; lower the "
                            "learning rate and train again")
    # Of a target in a folder or file `./` and its last part: its path would be true on one machine alone, and equal
    # runs in two places would write different bytes. The `./` says that no hub knows the name: whoever uses the
    # artifact says where the folder is.
    name = identity.name
    if is_local(name):
        name = f"./{Path(PureWindowsPath(name).as_posix()).name}"
    former: Mapping[str, Any] = {}
    with suppress(UserError):
        former = measured_files.read_acceptance(folder)
    with whole_folder(folder, "artifact", changing=CHANGING) as partial:
        # One metadata key: safetensors writes several in an order of its own, and the bytes would differ.
        save_file(weights, partial / WEIGHTS, metadata={"format": "pt"})
        config = {
            "format": "draftsmith",
            "format_version": FORMAT_VERSION,
            "family": drafter.family,
            "class": f"{type(drafter).__module__}.{type(drafter).__qualname__}",
            "drafter": drafter.describe(),
            "target": {**identity.fields(), "name": name},
            "tree": {"parents": list(topology.parents), "ranks": list(topology.ranks)},
            "weights_sha256": file_sha256(partial / WEIGHTS),
            "provenance": portable(provenance),
            "versions": {name: version(name) for name in ("draftsmith", "torch", "transformers", "safetensors")},
        }
        if adapter is not None:
            config["adapter"] = adapter.describe()
        write_file(partial / CONFIG, as_json(config))
        known = measured_files.profile(measured_files.described(config), acceptance)
        write_file(partial / ACCEPTANCE, as_json(known))
        card = model_card(config, sum(weight.numel() for weight in weights.values()))
        write_file(partial / CARD, "\n\n".join([card.rstrip("\n"), *measured_files.acceptance_lines(known)]) + "\n")
    # An evaluation of the same weights counted decoded answers, which no training counts again.
    decoded = [one for one in former.get("measurements", ()) if one["source"] == measured_files.DECODED]
    if decoded and former.get("weights_sha256") == config["weights_sha256"]:
        measured_files.save_acceptance(folder, measured_files.described(config), decoded)
    return folder


def load_artifact(folder: Path, target: Target, *, trust: bool = False, retarget: bool = False) -> Artifact:
    """Load an artifact for its target and bind it.

    Args:
        target: the one it was trained for; an artifact with an adapter decodes with a changed copy of it. A draft
            language model that reads tokens alone takes any of its tokenizer and vocabulary; what was measured with the
            one that it was trained for is then left out.
        trust: whether the class that the artifact names is imported, which runs its code, if its family is not one of
            this package's.
        retarget: whether a target of the same architecture and sizes with other weights will do.

    Raises:
        UserError: if the artifact is missing, damaged or of another format version; if it belongs to another target;
            if its family is unknown and not trusted."""
    drafter, adapter, config = load_drafter(folder, target, trust=trust, retarget=retarget)
    try:
        tree = typed_fields(config["tree"], {"parents": tuple[int, ...], "ranks": tuple[int, ...]})
        if (size := len(tree["parents"])) > MOST:
            raise UserError(f"{folder / CONFIG} describes a tree of {size:,} nodes, more than {MOST:,}; {AGAIN}")
        topology = Topology(**tree)
        identity = TargetIdentity.from_dict(config["target"])
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise UserError(f"{folder / CONFIG} is damaged: {error}; {AGAIN}") from error
    provenance = {**config["provenance"], "versions": config["versions"]}
    # It reads the target's states, which have the target's number format and device.
    drafter.to(device=target.device, dtype=target.dtype)
    decoder = target if adapter is None else target.adapted(adapter)
    drafter.bind(decoder)
    drafter.eval()
    # What one target accepts of a draft says nothing of another.
    shared = drafter.serves_all(config["drafter"]) and identity.weights_hash != target.identity.weights_hash
    provenance = {key: one for key, one in provenance.items() if not shared or key != "expected_accepted_length"}
    heads = {} if shared else load_heads(folder, config["weights_sha256"])
    for stored in heads.values():
        stored.head.to(target.device)
    return Artifact(drafter=drafter, target=decoder, topology=topology, identity=identity, provenance=provenance,
                    tuning=None if shared else read_tuning(folder), adapter=adapter, heads=heads,
                    weights_sha256=config["weights_sha256"], shared=shared,
                    acceptance={} if shared else measured_files.read_acceptance(folder))


def portable(value: Any) -> Any:
    """JSON-ready copy without absolute paths: each is cut to its last part."""
    if isinstance(value, Mapping):
        return {str(key): portable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [portable(item) for item in value]
    if isinstance(value, (str, Path)):
        text = str(value)
        path = PureWindowsPath(text) if PureWindowsPath(text).is_absolute() else PurePosixPath(text)
        # At least two parts: "/think" is more likely text for a model than a path.
        return path.name if path.is_absolute() and len(path.parts) > 2 else text
    return value
