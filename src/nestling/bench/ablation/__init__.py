"""Credit by ablation: what each part of an agent's jobs earns over the template's part."""
