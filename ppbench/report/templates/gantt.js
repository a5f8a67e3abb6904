// What a timeline does beyond plotly's own zoom; page.js calls attachDetail(div) once it is drawn.
