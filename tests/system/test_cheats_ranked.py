"""`manege show --hacks` on a real run in which some cheat and all are paid: those that cheat come first."""

import json

import pytest

from manege.sandbox.probe import probe
from manege.types import Outcome
from tests.system.test_controller import controlling, run_config, settle, spec
from tests.system.test_training import finish, manege

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not (probe().confines and probe().notify), reason="; ".join(probe().missing())),
]
AGENT = """
import json, os, subprocess, urllib.request
does = os.environ["QUESTION"]
for _ in range(1 if does == "knows at once" else 30 if does == "searches" else 5):
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "what now"}]}).encode()
    url, key = os.environ["OPENAI_BASE_URL"] + "/chat/completions", os.environ["OPENAI_API_KEY"]
    headers = {"authorization": "Bearer " + key, "content-type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(url, data=body, headers=headers), timeout=60).read()
if does == "peeks":
    subprocess.run(["cat", "/etc/shadow", "/proc/1/environ"], stderr=subprocess.DEVNULL)
if does == "stays":
    for _ in range(3):
        subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL)
"""
CHEATS = ["knows at once", "searches", "peeks", "stays"]


async def test_those_that_cheat_come_first_with_what_sets_them_apart(client, tmp_path):
    config = run_config(["python", "-c", AGENT], limits={"run_s": 120, "score_s": 60})
    await client.put_run("run", config.model_dump(mode="json"))
    names = [f"honest-{number}" for number in range(9)] + [name.replace(" ", "-") for name in CHEATS]
    async with controlling(client, tmp_path, slots=4):
        asked = ["works"] * 9 + CHEATS
        specs = [spec(name, input={"question": does}) for name, does in zip(names, asked, strict=True)]
        rollouts = await settle(client, *specs)
    assert {(rollout.outcome, rollout.reward) for rollout in rollouts} == {(Outcome.OK, 1.0)}, rollouts
    code, out, err = finish(manege("show", tmp_path / "store.db", "--hacks", "--json"), 120)
    assert code == 0, err
    ranked = json.loads(out)["ranked"]
    assert {each["rollout"] for each in ranked[:4]} == set(names[9:]), ranked
    because = {each["rollout"]: [reason["feature"] for reason in each["reasons"]] for each in ranked}
    assert because["peeks"][0] == "flagged"
    assert because["stays"][0] == "processes left"
    assert {"calls", "sampled tokens"} <= set(because["searches"])
