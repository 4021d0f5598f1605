"""Wrong names of draft policies."""

import pytest
from support.faults import Fault, Place, check, ids

NAMES = ["", "-", "chain-", "chain-0", "chain--1", "chain-1.5", "chain-x", "chain-\u0663", "static-0", "static-",
         "eagle2-1", "eagle2-0", "dyspec-1", "sampled-", "stopping-0", "Static", "static ", "chain-3-3", "eagle-3",
         "tree", "None", "sampled-chain-", "sampled-chain-0", "static\n", "'static'", "static,chain", "eagle2-\u00b2"]
SAYS = "there is no policy|ends in .*wants a whole number of at least"
FAULTS = [Fault(f"generate with the policy {name!a}", "generate --artifact {artifact} --prompt hi", SAYS,
                given=(f"--policy={name}",)) for name in NAMES]
FAULTS += [Fault(f"{words.split()[0]} with the policies {value}", words, says, given=(f"--evaluate.policies={value}",))
           for words in ("evaluate --out o --artifact {artifact}", "plan --config {tiny}")
           for value, says in (("[]", "policies must hold at least one name"), ("[chain-0]", SAYS),
                               ("[null]", "there is no policy"), ("{a: b}", "there is no policy"),
                               ("3", "there is no policy"),
                               ("[static,nothing]", "there is no policy 'nothing'"),
                               ("[[static]]", "there is no policy"))]


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize("fault", FAULTS, ids=ids(FAULTS))
def test_a_wrong_policy_is_refused_before_the_target_is_loaded(fault: Fault, place: Place) -> None:
    check(fault, place)
