"""The text of models that read pictures or sound too: one causal language model, without the towers of the others."""

from typing import Any

import torch


def auto_class(config: Any) -> Any:
    """The class of transformers that loads a configuration: for a language model, or for one that is wrapped."""
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING

    wrapped = type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForMultimodalLM if wrapped else AutoModelForCausalLM


def text_of(model: Any, *, spread: bool = False) -> Any:
    """The language model inside a model, around the very same weights; itself where nothing is wrapped around it.

    It is of the class that transformers has for such a text. Where there is none, or layers that are `spread` over
    processes or devices belong to the model that was read, that loses all but its decoder and output layer.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config, head = model.config.get_text_config(), model.get_output_embeddings()
    if config is model.config or config.is_encoder_decoder or head is None:
        return model
    decoder = model.get_decoder()
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), type(model))
    if not spread and not isinstance(model, kind):
        with torch.device("meta"):
            text = kind(config)
        inside = text.base_model_prefix
        if type(getattr(text, inside)) is type(decoder):
            setattr(text, inside, decoder)
            text.set_output_embeddings(head)
            text.generation_config = model.generation_config
            for name in ("is_quantized", "hf_quantizer", "quantised_as", "stored_in"):
                if hasattr(model, name):
                    setattr(text, name, getattr(model, name))
            return text.train(model.training)
    kept = {id(module) for part in (decoder, head) for module in part.modules()}
    parents = [module for module in model.modules() if any(id(inner) in kept for inner in module.modules())]
    for parent in parents:
        for name, child in list(parent.named_children()):
            if not any(child is other for other in parents):
                delattr(parent, name)
    return model
