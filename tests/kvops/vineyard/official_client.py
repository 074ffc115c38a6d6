"""What the stock Python client does on the other side of the cross-check; run by a Python that has it.

Commands come as JSON lines on standard input, answers go as JSON lines to standard output.
"""

import json
import sys


def serve(socket):
    import numpy
    import pandas
    import vineyard

    client = vineyard.connect(socket)
    held = []

    def find(text):
        return vineyard.ObjectID(text)

    def put_blob(text):
        builder = client.create_blob(len(text))
        builder.copy(0, text.encode())
        return repr(builder.seal(client).id)

    def put_array(dtype, shape):
        array = numpy.arange(int(numpy.prod(shape)), dtype=dtype).reshape(shape)
        return repr(client.put(array))

    def put_frame(rows):
        return repr(
            client.put(pandas.DataFrame({"a": range(rows), "b": [n / 2 for n in range(rows)]}))
        )

    def put_nested():
        return repr(client.put((1, ("two", 3.0), [4, 5], b"six")))

    def get(object_id):
        value = client.get(find(object_id))
        held.append(value)
        if isinstance(value, numpy.ndarray):
            return {
                "dtype": str(value.dtype),
                "shape": value.shape,
                "values": value.ravel().tolist(),
            }
        if isinstance(value, (bytes, memoryview)):
            return bytes(value).decode()
        return repr(value)

    def get_blob(object_id):
        blob = client.get_blob(find(object_id))
        held.append(blob)
        return None if blob is None else bytes(memoryview(blob)).decode()

    def get_blobs(ids):
        return [
            bytes(memoryview(blob)).decode()
            for blob in client.get_blobs([find(text) for text in ids])
        ]

    def get_name(name):
        return repr(client.get_name(name))

    def put_name(object_id, name):
        client.persist(find(object_id))
        client.put_name(find(object_id), name)

    def exists(object_id):
        return client.exists(find(object_id))

    def delete(object_id):
        client.delete(find(object_id))

    def list_names():
        return {
            name: repr(object_id) for name, object_id in client.list_names("*", limit=1000).items()
        }

    commands = dict(locals())
    print(json.dumps(vineyard.__version__), flush=True)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = {"answer": commands[name](*arguments)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
