// Which kernel tables this processor can run.
#include "colibri/kernels.h"
