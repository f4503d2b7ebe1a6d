"""What of ComfyUI is relied on besides its names, and how a lack, a refusal or a foreign function is said."""
