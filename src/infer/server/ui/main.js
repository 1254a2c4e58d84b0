/** The page's first module: the frame, then the view that the address names. */

import { server } from "./lib/api.js";
import "./views/app.js";

void server.refresh();
