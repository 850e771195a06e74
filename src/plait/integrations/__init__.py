"""plait under the names and conventions of other libraries; `import plait` imports none of it."""
