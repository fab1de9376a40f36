"""Code that runs inside SGLang's server: takes processed images. Found by SGLang with SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE."""
