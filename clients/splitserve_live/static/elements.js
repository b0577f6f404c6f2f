// Elements of the page, and what they say.

export function element(name, className = "", content = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (content) made.textContent = content;
  return made;
}

export function text(node, content) {
  if (node.textContent !== content) node.textContent = content;
}

// As many children as there are values, each made once by `make()` and told its value by
// `write(child, value)`.
export function fill(list, values, make, write) {
  while (list.children.length > values.length) list.lastChild.remove();
  values.forEach((value, index) => {
    if (!list.children[index]) list.append(make());
    write(list.children[index], value);
  });
}

// A sign of what blocks or rows look like, and words.
export function sign(className) {
  const made = element("span", "sign");
  const mark = element("i", className);
  mark.setAttribute("aria-hidden", "true");
  made.append(mark, element("span"));
  return made;
}
