// What is wrong with the page as it is laid out now, by kind; every list should be empty. Called with the width of the window.
(width) => {
  const shown = e => e.getClientRects().length > 0;

  // What sticks out of the window, unless it is inside something that may be scrolled sideways.
  const sticksOut = [...document.querySelectorAll('body *')].filter(e => {
    const box = e.getBoundingClientRect();
    return box.width > 1 && box.right > width + 0.5 && !e.closest('.scroll > *');
  }).map(e => e.outerHTML.slice(0, 120));

  // Text whose contrast with what is behind it is below 4.5 (WCAG 2, AA).
  const channels = colour => (colour.match(/[\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const linear = v => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = colour => {
    const [r, g, b] = channels(colour).map(v => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const clear = colour => channels(colour)[3] === 0;
  const grounds = new Map();
  const behind = e => {
    if (!e) return 'rgb(255,255,255)';
    if (!grounds.has(e)) {
      const rect = e.tagName === 'g' && e.querySelector(':scope > rect');
      const own = rect ? getComputedStyle(rect).fill : getComputedStyle(e).backgroundColor;
      grounds.set(e, clear(own) ? behind(e.parentElement) : own);
    }
    return grounds.get(e);
  };
  const faint = new Set();
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text = walk.nextNode(); text; text = walk.nextNode()) {
    const e = text.parentElement;
    if (!text.textContent.trim() || !shown(e) || e.closest('title, desc')) continue;
    const ink = e.closest('svg') ? getComputedStyle(e).fill : getComputedStyle(e).color;
    const [low, high] = [light(ink), light(behind(e))].sort((a, b) => a - b);
    if ((high + 0.05) / (low + 0.05) < 4.5) faint.add(`${ink} on ${behind(e)}: ${text.textContent.trim().slice(0, 40)}`);
  }

  // Short words that are broken over lines: a column that is too narrow.
  const broken = [];
  const range = document.createRange();
  const words = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text = words.nextNode(), n = 0; text && n < 4000; text = words.nextNode()) {
    if (!shown(text.parentElement) || text.parentElement.closest('code')) continue; // a path may be longer than a line
    for (const word of text.textContent.matchAll(/[A-Za-z0-9]{2,10}/g)) {
      range.setStart(text, word.index);
      range.setEnd(text, word.index + word[0].length);
      if (new Set([...range.getClientRects()].map(r => Math.round(r.top))).size > 1) broken.push(text.textContent.trim().slice(0, 60));
      n += 1;
    }
  }

  // Words of a drawing that reach over the edge of their box.
  const spills = [...document.querySelectorAll('g.node')].filter(shown).flatMap(g => {
    const box = g.querySelector('rect').getBoundingClientRect();
    return [...g.querySelectorAll('text')].filter(t => {
      const own = t.getBoundingClientRect();
      return own.left < box.left - 1 || own.right > box.right + 1 || own.top < box.top - 1 || own.bottom > box.bottom + 1;
    }).map(t => t.textContent);
  });

  return {sticksOut: sticksOut.slice(0, 10), faint: [...faint].slice(0, 10), broken: broken.slice(0, 10), spills: spills.slice(0, 10)};
}
