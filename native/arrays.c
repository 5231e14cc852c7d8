/* arrays.c: checks the arrays of Python before C reads them. */
#include "arrays.h"

#include <string.h>

PyObject *Unfit;

int open_array(PyObject *object, char type, int writable, Py_buffer *view)
{
    const int flags = PyBUF_FORMAT | PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object, view, flags) != 0) {
        PyErr_Clear();
        PyErr_SetString(Unfit, "not an array that C can use");
        return -1;
    }
    const char *formats = type == 'i' ? "lq" : type == 'u' ? "LQ" : "d";
    int fits = type == 'b' || (view->ndim == 1 && view->itemsize == 8 && strlen(view->format) == 1 &&
                               strchr(formats, view->format[0]) != NULL &&
                               (view->len == 0 || (uintptr_t)view->buf % 8 == 0));
    if (fits)
        return 0;
    PyBuffer_Release(view);
    PyErr_SetString(Unfit, "not a one-dimensional array of the type that C wants");
    return -1;
}

void close_arrays(Py_buffer *views, int count)
{
    while (count-- > 0)
        PyBuffer_Release(&views[count]);
}

int overlap(const Py_buffer *views, int count)
{
    for (int i = 0; i < count; i++)
        for (int j = i + 1; j < count; j++) {
            const char *a = views[i].buf, *b = views[j].buf;
            int apart = a + views[i].len <= b || b + views[j].len <= a;
            if (!apart && !(views[i].readonly && views[j].readonly))
                return 1;
        }
    return 0;
}

int open_arrays(PyObject *const *args, Py_ssize_t nargs, const char *types, Py_buffer *views)
{
    int count = (int)strlen(types), first = types[0] == 'U';
    if (nargs != count) {
        PyErr_Format(PyExc_TypeError, "takes %d arrays, got %zd", count, nargs);
        return -1;
    }
    for (int i = 0; i < count; i++) {
        int writable = types[i] < 'a';
        if (open_array(args[i], (char)(types[i] | 0x20), writable, &views[i]) != 0) {
            close_arrays(views, i);
            return -1;
        }
        if (views[i].len != views[first < i ? first : i].len || (types[i] == 'U' && views[i].len != 8)) {
            close_arrays(views, i + 1);
            PyErr_SetString(Unfit, "arrays of different lengths");
            return -1;
        }
    }
    if (types[count - 1] < 'a' && overlap(views, count)) {
        close_arrays(views, count);
        PyErr_SetString(Unfit, "arrays that share memory");
        return -1;
    }
    return 0;
}

int open_numbers(PyObject *object, Py_buffer *view)
{
    if (PyObject_GetBuffer(object, view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) != 0) {
        PyErr_Clear();
        PyErr_SetString(Unfit, "not an array that C can use");
        return -1;
    }
    int known = strlen(view->format) == 1 && strchr("hif", view->format[0]) != NULL;
    if (known && (view->len == 0 || (uintptr_t)view->buf % (uintptr_t)view->itemsize == 0))
        return 0;
    PyBuffer_Release(view);
    PyErr_SetString(Unfit, "not an array of int16, int32 or float32");
    return -1;
}
