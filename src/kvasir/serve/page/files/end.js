// The end of a box that scrolls: kept in sight as the box grows, unless the reader has gone up from it.

const NEAR = 30; // pixels; who comes back so close to the end follows it again

export class End {
  constructor(box) {
    this.box = box;
    this.top = 0; // where the box was scrolled to last
    this.kept = true;
    box.addEventListener("scroll", () => this.scrolled());
    new ResizeObserver(() => this.keep()).observe(box); // the composer takes some of its height
  }

  get below() {
    return this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight;
  }

  /** Growing content scrolls nothing, so what went up was the reader, or content that got shorter: then the end is in
   *  sight. */
  scrolled() {
    const isUp = this.box.scrollTop < this.top;
    this.top = this.box.scrollTop;
    if (isUp && this.below > 1) this.kept = false;
    else if (this.below < NEAR) this.kept = true;
    this.box.classList.toggle("following", this.kept);
  }

  go() {
    this.kept = true;
    this.keep();
  }

  /** To be called after what is in the box has changed. */
  keep() {
    if (this.kept) this.box.scrollTop = this.box.scrollHeight;
    this.box.classList.toggle("following", this.kept);
  }
}
