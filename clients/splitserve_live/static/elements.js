// Helpers that create elements and set their text.

export function element(name, className = "", content = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (content) made.textContent = content;
  return made;
}

export function text(node, content) {
  if (node.textContent !== content) node.textContent = content;
}

// Gives `list` a child for each value: `make()` creates it once, `write(child, value)` updates it.
export function fill(list, values, make, write) {
  while (list.children.length > values.length) list.lastChild.remove();
  values.forEach((value, index) => {
    if (!list.children[index]) list.append(make());
    write(list.children[index], value);
  });
}

// Creates a legend entry: the mark of blocks or rows, and a text.
export function sign(className) {
  const made = element("span", "sign");
  const mark = element("i", className);
  mark.setAttribute("aria-hidden", "true");
  made.append(mark, element("span"));
  return made;
}
