/* arrays.h - Python's arrays as C reads them: opened, checked, closed.
 *
 * An array that C cannot read raises Unfit. The caller closes every array that it opened. */
#ifndef APEX_ARRAYS_H
#define APEX_ARRAYS_H

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern PyObject *Unfit;

/* The most arrays that one call takes. */
#define MAX_ARRAYS 4

/* Input: an object and what its elements must be: 'i' int64, 'u' uint64, 'f' float64, 'b' bytes of any
 * shape. Result: 0 and a buffer, to be released by the caller, or -1 and an exception. An empty array may
 * lie anywhere. */
int open_array(PyObject *object, char type, int writable, Py_buffer *view);

/* Input: open arrays. Result: they are closed. */
void close_arrays(Py_buffer *views, int count);

/* Input: buffers. Result: whether a written buffer shares memory with another one. C could then read its
 * own output as input, even as a slot. */
int overlap(const Py_buffer *views, int count);

/* Input: the arguments of a call, and a letter for each as in open_array, upper case where written to.
 * Result: 0 and as many buffers, all of one length but for 'U' and 'b', or -1 and an exception. */
int open_arrays(PyObject *const *args, Py_ssize_t nargs, const char *types, Py_buffer *views);

/* Input: an object. Result: 0 and its buffer, contiguous, of int16 ("h") or float32 ("f") and of any shape, or
 * -1 and an exception. */
int open_numbers(PyObject *object, Py_buffer *view);

#endif
