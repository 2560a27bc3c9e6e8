"""Decodes with the speculator of this folder, exactly, in one line of transformers:

model.generate(ids, custom_generate=FOLDER_OR_HUB_ID, trust_remote_code=True)
"""


def generate(inputs=None, *, model, **options):
    try:
        from slipstream.custom_generation import generate_with_folder
    except ImportError as error:
        raise ImportError(
            "custom_generate: this speculator decodes with Slipstream, which is not installed; "
            "install it from its checkout with pip install path/to/slipstream"
        ) from error
    return generate_with_folder(model, inputs, **options)
