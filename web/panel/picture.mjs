/* The picture that a run made: the last one that its prompt saved or showed, of any node but the report's chart. */

const CHARTS = 'ShowTimingReport'

/** An ImageBitmap, or undefined where it is not there any more, or is nothing that a browser draws. */
export async function pictureOf(api, report) {
  const prompt = report.raw?.prompt_id
  if (typeof prompt !== 'string' || prompt === '') return undefined
  try {
    const history = await (await api.fetchApi(`/history/${encodeURIComponent(prompt)}`)).json()
    const { prompt: queued, outputs } = history[prompt]
    const images = Object.entries(outputs)
      .filter(([id]) => queued[2]?.[id]?.class_type !== CHARTS)
      .flatMap(([, output]) => output.images ?? [])
    const image = images.findLast(({ type }) => type === 'output') ?? images.at(-1)
    const answer = await api.fetchApi(`/view?${new URLSearchParams(image)}`)
    return await createImageBitmap(await answer.blob())
  } catch {
    return undefined // forgotten by the server, or a video
  }
}
