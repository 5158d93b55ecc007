"""The chat templates that --chat-template knows by name, in jinja.

`{% generation %}` surrounds the assistant's text, the token that ends its turn included: the loss counts these tokens.
Each name stands for the format of the models of that name; `alpaca` is the prompt of Stanford Alpaca
(https://github.com/tatsu-lab/stanford_alpaca), for conversations of several turns as well.
"""

_ALPACA = """{{ bos_token }}\
{% for message in messages %}\
{% if message.role == 'system' %}{{ message.content }}

{% elif message.role == 'user' %}\
{% if loop.first and message.input %}\
Below is an instruction that describes a task, paired with an input that provides further context. \
Write a response that appropriately completes the request.

{% elif loop.first %}\
Below is an instruction that describes a task. Write a response that appropriately completes the request.

{% endif %}\
### Instruction:
{{ message.instruction or message.content }}

{% if message.input %}### Input:
{{ message.input }}

{% endif %}\
{% else %}### Response:
{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}\
{% if not loop.last %}{{ '\\n\\n' }}{% endif %}\
{% endif %}\
{% endfor %}\
{% if add_generation_prompt %}### Response:
{% endif %}"""

_CHATML = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}{{ '\\n' }}\
{% else %}{{ message.content }}<|im_end|>
{% endif %}\
{% endfor %}\
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

_LLAMA2 = """\
{% set begin = namespace(system='') %}\
{% for message in messages %}\
{% if message.role == 'system' %}{% set begin.system = '<<SYS>>\\n' + message.content + '\\n<</SYS>>\\n\\n' %}\
{% elif message.role == 'user' %}{{ bos_token }}[INST] {{ begin.system }}{{ message.content }} [/INST] \
{% set begin.system = '' %}\
{% else %}{% generation %}{{ message.content }} {{ eos_token }}{% endgeneration %}\
{% endif %}\
{% endfor %}"""

_LLAMA3 = """<|begin_of_text|>\
{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>

{% if message.role == 'assistant' %}{% generation %}{{ message.content | trim }}<|eot_id|>{% endgeneration %}\
{% else %}{{ message.content | trim }}<|eot_id|>\
{% endif %}\
{% endfor %}\
{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

_ZEPHYR = """\
{% for message in messages %}<|{{ message.role }}|>
{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}{{ '\\n' }}\
{% else %}{{ message.content }}{{ eos_token }}
{% endif %}\
{% endfor %}\
{% if add_generation_prompt %}<|assistant|>
{% endif %}"""

TEMPLATES = {"alpaca": _ALPACA, "chatml": _CHATML, "llama2": _LLAMA2, "llama3": _LLAMA3, "zephyr": _ZEPHYR}
"""Templates by name."""

SPECIAL_TOKENS = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
}
"""Tokens that a template takes for granted, by its name."""
