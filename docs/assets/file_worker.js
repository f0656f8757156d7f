// SPDX-License-Identifier: Apache-2.0
// Browsers start no Worker for a page of file://. There the search runs in an iframe instead, with the
// few functions of a Worker that it uses.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.scope = frame.contentWindow;
      this.scope.postMessage = data => this.dispatchEvent(new MessageEvent("message", {data}));
      const script = frame.contentDocument.createElement("script");
      this.loaded = new Promise(resolve => { script.onload = resolve; });
      script.src = new URL(url, location.href);
      frame.contentDocument.head.append(script);
    }

    postMessage(data) {
      this.loaded.then(() => this.scope.dispatchEvent(new MessageEvent("message", {data})));
    }

    terminate() {
      this.scope.frameElement.remove();
    }
  };
}
