// Unpacks what pages/templates.py packs: deflated bytes in base64, in a <script> of unknown type.

// Resolves to the bytes that `pack_bytes` was given.
async function unpackBytes(script) {
  const text = atob(script.textContent.trim());
  const deflated = new Uint8Array(text.length);
  for (let n = 0; n < text.length; n++) deflated[n] = text.charCodeAt(n);
  const inflated = new Blob([deflated]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(inflated).arrayBuffer());
}

// Resolves to the text of a packed figure.
async function unpackText(script) {
  return new TextDecoder().decode(await unpackBytes(script));
}
