"""What several tests paste from the documents."""

# The VLA configuration example, less its two lines that say "...".
VLA_EXAMPLE = """{
  "trainer": {
    "buffer_type": "vla",
    "buffer_size": 2048,
  },
  "policy": {
    "name": "vla",
    "action_dim": 7,
    "vla_config": {
      "model_path": "checkpoints/pretrained_vla_model.pth",
      "model_class": "vla_models.GPTVLAModel",
      "model_config": {
        "vision_encoder": "resnet50",
        "language_model": "gpt2-medium",
        "freeze_vision_encoder": false
      }
    }
  },
  "algorithm": {
    "name": "ppo",
    "cfg": {
      "learning_rate": 1e-5,
    }
  }
}
"""
