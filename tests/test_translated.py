"""Every sentence that the pack says to users has one in Chinese, with the same places, and none is left over.

The sentences of Python are read from its source (said.py); how the panel finds them in what the server sends is
words.mjs's, which node runs here. Words of the panel and of nodes: test_words_and_help.py.
"""

import ast
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from said import EXTRA, ROOT, SAME, all_sentences, check_names
from test_words_and_help import FILES, PANEL, words

MESSAGES = ROOT / "web" / "panel" / "messages.zh.json"
PLACE = re.compile(r"\{\w+\}")
PLURAL = re.compile(r"(?<=[a-z])(\{\w+\})(?!\w)")  # an "s" or nothing
CHINESE = re.compile("[\u4e00-\u9fff]")
CODE = """
import { readFileSync } from 'node:fs'
const { makeSaid } = await import(process.argv[1])
const said = makeSaid(JSON.parse(readFileSync(process.argv[2], 'utf8')))
console.log(JSON.stringify(JSON.parse(readFileSync(0, 'utf8')).map((text) => said(text))))"""


def messages() -> dict[str, str]:
    """Each sentence, and the same in Chinese."""
    return json.loads(MESSAGES.read_text(encoding="utf-8"))


def wanted() -> set[str]:
    """All sentences that are said, but names that are the same in every language."""
    found = {text for of_file in all_sentences().values() for text in of_file}
    return (found | set(check_names()) | set(EXTRA)) - SAME


def test_every_sentence_is_translated_and_none_is_left_over() -> None:
    assert sorted(wanted() - messages().keys()) == []
    assert sorted(messages().keys() - wanted() - SAME) == []


def test_a_translation_is_chinese_and_has_the_same_places() -> None:
    for english, chinese in messages().items():
        plurals = set(PLURAL.findall(english))
        places = set(PLACE.findall(english))
        assert places - plurals <= set(PLACE.findall(chinese)) <= places, english
        assert CHINESE.search(chinese), english


# What the server sends, and what a Chinese user reads.
SENT = {
    "tried ring 2: 0.92x, kept ulysses 2; not tried for lack of time: cfg 2 (all are predicted to take 10 s)": (
        "已试用 ring 2: 0.92x，保留 ulysses 2；因时间不足未试用：cfg 2（全部预计需要 10 秒）"
    ),
    "memory: about 0.6 of 12.6 GB on each device, and 1.5 GB of host memory": (
        "显存/内存：约 0.6 GB（每个设备共有 12.6 GB），另需主机内存 1.5 GB"
    ),
    "memory: about 7.5 of 8.0 GB on cuda:1, the fullest device": (
        "显存/内存：约 7.5 GB（最满的设备 cuda:1 共有 8.0 GB）"
    ),
    "pipefusion=5 is more stages than the model's 3 blocks; use at most 3": (
        "pipefusion=5 的级数多于模型的 3 个块；请最多使用 3"
    ),
    "rank 1 (cuda:1): a link between the GPUs failed; restart the machine; look at nvidia-smi nvlink -e, and set "
    "NCCL_P2P_DISABLE=1 until it is repaired": (
        "rank 1 (cuda:1)：GPU 之间的链路失败；请重启机器；请查看 nvidia-smi nvlink -e，修复前设置 NCCL_P2P_DISABLE=1"
    ),
    "cuda:0: replica 0, 1/2 of the attention heads\ncuda:1 sleeps": "cuda:0：副本 0，注意力头的 1/2\ncuda:1 不参与",
    "chosen for 1024 x 1024 pixels, 4096 image tokens, 512 text tokens, cfg 1, one image; each sampling run chooses "
    "again for what it samples, with the weights as they lie; mode=manual forces another plan": (
        "按 1024 x 1024 像素，4096 个图像 token，512 个文本 token，cfg 1，一张图像 选定；"
        "每次采样会按其内容重新选择，权重保持原位；用 mode=manual 可强制使用其他方案"
    ),
    "weighed for a video of 1024 x 1024 pixels, 81 frames, 86016 image tokens, 512 text tokens, cfg above 1, "
    "one image: of that size no plan fits on these devices, and of a smaller one some may": (
        "按 视频 1024 x 1024 像素，81 帧，86016 个图像 token，512 个文本 token，cfg 大于 1，一张图像 衡量："
        "此尺寸在这些设备上没有可用的方案，较小的尺寸也许可以"
    ),
    "chosen for a size of 1024 x 1024 pixels, 4096 image tokens, 512 text tokens, cfg above 1, one image; mode=manual "
    "forces another plan": (
        "按 1024 x 1024 像素，4096 个图像 token，512 个文本 token，cfg 大于 1，一张图像 选定；"
        "用 mode=manual 可强制使用其他方案"
    ),
    "uly2: 12.0 ms a step, limited by compute (80% of the step)": "uly2：每步 12.0 ms，受限于计算（占 80%）",
    "blocks run uncompiled: compiling needs a C++ compiler, and g++ is not there; install g++": (
        "块未编译运行：编译需要 C++ 编译器，但没有 g++；请安装 g++"
    ),
    "a text of somebody else: with parts, and commas; and more": (
        "a text of somebody else: with parts, and commas; and more"
    ),
}


@pytest.fixture(scope="module")
def node() -> str:
    """Runs the panel's modules; Playwright brings one where the system has none."""
    found = shutil.which("node")
    if found is None:
        import playwright

        found = str(Path(playwright.__file__).parent / "driver" / "node")
    return found


def said(node: str, texts: list[str]) -> list[str]:
    """What a Chinese user reads of these, one after the other."""
    told = subprocess.run(
        [node, "--input-type=module", "-e", CODE, str(ROOT / "web" / "panel" / "words.mjs"), str(MESSAGES)],
        input=json.dumps(texts),
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(told.stdout)


def test_what_the_server_sends_is_found_and_what_is_unknown_stays_however_often_and_deep(node: str) -> None:
    many = [f"said by nobody {number}" for number in range(250)]
    texts = [*SENT, *many, *SENT, *SENT]
    assert said(node, texts) == [*SENT.values(), *many, *SENT.values(), *SENT.values()]
    known, chinese = "the whole model", "整个模型"
    assert said(node, ["xy: " * 8 + known, "xy: " * 9 + known]) == ["xy：" * 8 + chinese, "xy: " * 9 + known]


# Words of the panel that are the same in every language: names, marks, formats. Names of inputs are what errors quote.
SAME_WORDS = {"Parallel DiT", "cfg", "PipeFusion", "ring", "ulysses", "PNG", "JSON", "Trace", "Perfetto", "rank"}
OF_A_USER = re.compile(r"""(['"`])((?:[A-Z][a-z]+|[A-Z]{2,}) [^'"`\n<>{}=]*?[a-z]{2,}[^'"`\n<>{}=]*)\1""")


@pytest.mark.parametrize("file", FILES)
def test_the_words_of_panel_and_nodes_are_chinese(file: str) -> None:
    left = {
        key: text
        for key, text in words("zh", file).items()
        if not CHINESE.search(text) and re.search("[A-Za-z]{2}", PLACE.sub("", text)) and not key.endswith(".name")
    }
    assert {key: text for key, text in left.items() if text not in SAME_WORDS} == {}


def test_no_text_of_the_panel_is_written_outside_the_locales() -> None:
    """Labels of commands and settings are their English in the code, which ComfyUI translates by their ids."""
    known = {text for file in FILES for text in words("en", file).values()}
    for path in [*PANEL.glob("*.mjs"), ROOT / "web" / "parallel_dit.js"]:
        code = re.sub(r"/\*.*?\*/|//[^\n]*", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        texts = {text for _, text in OF_A_USER.findall(code)}
        assert texts - known == set(), path.name
    assert OF_A_USER.findall("setText(line, 'Nothing was measured')")


def test_the_english_words_of_nodes_are_those_of_their_schemas() -> None:
    """ComfyUI shows the locale's words even in English: a tooltip that changed in one place alone is found."""
    known = set(words("en", "nodeDefs.json").values())
    for path in (ROOT / "nodes").glob("*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.keyword) and call.arg in ("tooltip", "description", "display_name"):
                if isinstance(call.value, ast.Constant) and " " in str(call.value.value):
                    assert call.value.value in known, path.name
