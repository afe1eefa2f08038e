"""Templates render as in transformers, and a template cannot leave its sandbox.

How messages become tokens is tested in tests/gateway/test_encoding.py, through the gateway and the LLM.
"""

import pytest
from model_folders import make_folder
from tandem_core.errors import InvalidRequestError, ModelLoadError
from tandem_core.model.chat_template import ChatTemplate, Message
from tandem_core.model.tokenizer import Tokenizer
from toy_tokenizers import without_merges
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EACH = "{% for m in messages %}"
TEMPLATES = {
    "trimming": EACH + "\n  {% if m.role == 'user' %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}\n",
    "tojson": "{{ messages | tojson }}|{{ messages[0] | tojson(indent=2) }}|{{ '<é>' | tojson }}",
    "loop controls": EACH + "{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}" + EACH + "{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "dict": "{{ dict(a=1).a }}{{ dict.fromkeys(['x'], 2) }}",
    "generation": EACH + "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "specials": "{{ bos_token + eos_token }}{% if tools is none %}none{% endif %}{{ add_generation_prompt }}",
    "date": "{{ strftime_now('%Y') }}",
}


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos_token="<|im_start|>", eos_token="<|im_end|>", control_tokens=())


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_every_template_feature_renders_as_in_transformers(source):
    messages = [Message("user", "a <b>"), Message("assistant", "é")]
    (segment,) = template(source).render(messages)
    reference = PreTrainedTokenizerFast(
        tokenizer_object=without_merges(100, SPECIAL), bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    expected = reference.apply_chat_template(
        [vars(m) for m in messages], chat_template=source, add_generation_prompt=True, tokenize=False
    )
    assert segment.text == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 'a' + 1 }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ ns['_x'] }}",
    ],
)
def test_what_a_template_refuses_or_may_not_do_is_the_callers_error(source):
    with pytest.raises(InvalidRequestError, match=r"^messages: the model's chat template refuses them"):
        template(source).render([Message("user", "x")])


def test_a_template_that_is_no_jinja_is_one_clear_error():
    with pytest.raises(ModelLoadError, match="chat template cannot be compiled"):
        template("{% if %}")


def test_a_model_without_a_template_sends_chat_elsewhere(tmp_path):
    folder = make_folder(tmp_path, without_merges(100, SPECIAL), chat_template="")
    with pytest.raises(InvalidRequestError, match=r"no chat template.*/v1/completions"):
        Tokenizer(folder).encode_chat([Message("user", "hi")])
