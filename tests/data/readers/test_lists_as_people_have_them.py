"""Lists from the world: other names of columns, labels in many forms, files that are not quite where it says."""

from pathlib import Path

import pytest
from PIL import Image

from vitrail.core.errors import DataError
from vitrail.data.collection import Collection, open_collection


def write(folder: Path, text: str | bytes, *images: str, name: str = "list.csv") -> str:
    for image in images or ("1.jpg", "2.jpg", "3.jpg"):
        (folder / image).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 3)).save(folder / image)
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def found(collection: Collection) -> list[tuple[str, set[str]]]:
    source = collection.split("train")
    names = source.classes
    return [(source.name(at), {names[label] for label in source.labels[at]}) for at in range(len(source))]


CATS = [("1.jpg", {"cat"}), ("2.jpg", {"dog"}), ("3.jpg", {"cat"})]


@pytest.mark.parametrize("image", ["path", "filename", "file", "image", "Image Path", "img", "image_name", "FILE_NAME"])
@pytest.mark.parametrize("label", ["label", "class", "Breed", "category", "target", "species", "class_name"])
def test_columns_by_the_names_people_give_them(image: str, label: str, tmp_path: Path) -> None:
    opened = open_collection(write(tmp_path, f"{image},{label}\n1.jpg,cat\n2.jpg,dog\n3.jpg,cat\n"))
    assert found(opened) == CATS
    usual = image.lower() in ("path", "file_name") and label == "label"
    assert [note for note in opened.notes if image in note and label in note] == ([] if usual else list(opened.notes))


@pytest.mark.parametrize(
    "text",
    [
        b"\xef\xbb\xbfid,breed\n1,cat\n2,dog\n3,cat\n",
        "id;breed\n1;cat\n2;dog\n3;cat\n",
        "id\tbreed\n1\tcat\n2\tdog\n3\tcat\n",
        '"id", "breed"\n"1", "cat"\n"2", "dog"\n"3", "cat"\n',
        " id , breed \r\n1.jpg , cat\r\n2.jpg , dog\r\n3.jpg , cat\r\n",
        ",id,breed,note\n0,1,cat,x\n1,2,dog,y\n2,3,cat,z\n",
        "id,breed,width,filename\n7,cat,4,1.jpg\n8,dog,4,2.jpg\n9,cat,4,3.jpg\n",
        "image,path,class\nx,1.jpg,cat\ny,2.jpg,dog\nz,3.jpg,cat\n",
        "image,file,class\nx,1.jpg,cat\ny,2.jpg,dog\nz,3.jpg,cat\n",
        "file,class_id,class_name\n1.jpg,0,cat\n2.jpg,1,dog\n3.jpg,0,cat\n",
        "file,cat,dog\n1.jpg,1,0\n2.jpg,0,1\n3.jpg,1,0\n",
    ],
)
def test_lists_as_they_come(text: str | bytes, tmp_path: Path) -> None:
    opened = open_collection(write(tmp_path, text))
    assert found(opened) == CATS
    assert not opened.split("train").labels.multiple


@pytest.mark.parametrize(
    ("text", "classes"),
    [
        ("image,labels\n1.jpg,cat|dog\n2.jpg,\n3.jpg,dog\n", ("cat", "dog")),
        ("image_name,tags\n1,cat dog\n2,\n3,dog\n", ("cat", "dog")),
        ("image,labels\n1.jpg,cat dog\n2.jpg,\n3.jpg,dog\n", ("cat", "cat dog", "dog")[1:]),
        ('image,tags\n1.jpg,"cat, dog"\n2.jpg,\n3.jpg,dog\n', ("cat", "dog")),
        ("image,classes\n1.jpg,\"['cat', 'dog']\"\n2.jpg,[]\n3.jpg,['dog']\n", ("cat", "dog")),
        ("image,cat,dog\n1.jpg,1,1\n2.jpg,0,0\n3.jpg,0,1\n", ("cat", "dog")),
        ("image,cat,dog\n1.jpg,1,1\n2.jpg,-1,-1\n3.jpg,-1,1\n", ("cat", "dog")),
        ("image,cat,dog,age\n1.jpg,True,True,7\n2.jpg,False,False,8\n3.jpg,False,True,9\n", ("cat", "dog")),
    ],
)
def test_several_labels_in_many_forms(text: str, classes: tuple[str, ...], tmp_path: Path) -> None:
    opened = open_collection(write(tmp_path, text))
    assert opened.classes == classes
    assert opened.split("train").labels.multi_label
    if "cat" in classes:
        assert found(opened) == [("1.jpg", {"cat", "dog"}), ("2.jpg", set()), ("3.jpg", {"dog"})]


def test_words_that_are_labels_by_themselves_are_split_at_spaces(tmp_path: Path) -> None:
    apart = open_collection(write(tmp_path, "image,labels\n1.jpg,cat dog\n2.jpg,cat\n3.jpg,dog\n"))
    assert (apart.classes, "spaces" in apart.notes[0]) == (("cat", "dog"), True)
    one = open_collection(write(tmp_path, "image,labels\n1.jpg,wood pigeon\n2.jpg,cat\n3.jpg,dog\n"))
    assert one.classes == ("cat", "dog", "wood pigeon")
    numbers = open_collection(write(tmp_path, "Id,Target\n1,2 0\n2,1\n3,0\n"))
    assert (numbers.classes, numbers.split("train").labels[0]) == (("0", "1", "2"), (2, 0))


@pytest.mark.parametrize(
    ("cells", "images"),
    [
        (("a.jpg", "b.png"), ("photos/a.jpg", "photos/b.png")),
        (("a", "b"), ("train/a.jpg", "train/b.png")),
        (("photos\\a.jpg", "photos\\b.jpg"), ("photos/a.jpg", "photos/b.jpg")),
        (("C:\\me\\photos\\a.jpg", "C:\\me\\photos\\b.jpg"), ("photos/a.jpg", "photos/b.jpg")),
        (("/home/me/a.jpg", "/home/me/b.jpg"), ("deep/er/a.jpg", "deep/er/b.jpg")),
        (("cat/1", "dog/1"), ("set/cat/1.jpg", "set/dog/1.jpg")),
        (("a b.jpg", "ä, ö.jpg"), ("photos/a b.jpg", "photos/ä, ö.jpg")),
    ],
)
def test_files_that_are_not_quite_where_the_list_says(
    cells: tuple[str, str], images: tuple[str, str], tmp_path: Path
) -> None:
    text = "image,label\n" + "".join(f'"{cell}",{label}\n' for cell, label in zip(cells, ("x", "y"), strict=True))
    opened = open_collection(write(tmp_path, text, *images))
    assert [name for name, _ in found(opened)] == list(images)
    assert opened.split("train").open_image(1).size == (3, 4)


def test_a_file_of_the_same_name_elsewhere_is_not_taken(tmp_path: Path) -> None:
    text = "image,label\ncat/1.jpg,cat\ndog/1.jpg,dog\n"
    opened = open_collection(write(tmp_path, text, "cat/1.jpg"))
    assert [name for name, _ in found(opened)] == ["cat/1.jpg", "dog/1.jpg"]  # missing, and met when it is read
    text = "image,label\nC:\\cat\\1.jpg,cat\nC:\\dog\\1.jpg,dog\n"
    opened = open_collection(write(tmp_path, text, "cat/1.jpg"))
    assert [name for name, _ in found(opened)] == ["cat/1.jpg", "C:\\dog\\1.jpg"]


def test_the_folder_of_the_same_name_as_the_list(tmp_path: Path) -> None:
    images = ("train_images/1.jpg", "train_images/2.jpg", "test_images/1.jpg", "test_images/2.jpg")
    path = write(tmp_path, "id,breed\n1,cat\n2,dog\n", *images, name="train.csv")
    assert [name for name, _ in found(open_collection(path))] == ["train_images/1.jpg", "train_images/2.jpg"]
    with pytest.raises(DataError):
        open_collection(write(tmp_path, "id,breed\n1,cat\n2,dog\n", *images))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("filename,class,breed\n1.jpg,pet,cat\n2.jpg,pet,dog\n3.jpg,pet,cat\n", ["class", "breed", "label=class"]),
        ("image,file,class\n1.jpg,2.jpg,cat\n2.jpg,1.jpg,dog\n", ["image", "file", "image=image"]),
        ("width,height\n4,3\n", ["width,height", "image=COLUMN"]),
    ],
)
def test_what_may_be_two_columns_is_refused_with_the_choice(text: str, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(DataError) as refusal:
        open_collection(write(tmp_path, text))
    assert all(word in str(refusal.value) for word in words)
    assert "\n" not in str(refusal.value)


def test_columns_can_be_chosen(tmp_path: Path) -> None:
    path = write(tmp_path, "a,b,c,d,part\n1.jpg,cat,1,0,train\n2.jpg,dog,1,1,test\n3.jpg,cat,0,1,train\n")
    opened = open_collection(f"{path}:image=a,label=b,split=part")
    assert [len(source) for source in opened.splits.values()] == [2, 1]
    assert opened.classes == ("cat", "dog")
    assert found(open_collection(f"{path}:image=a,label=c+d@train"))[1] == ("2.jpg", {"c", "d"})
    assert set(open_collection(f"{path}:image=a,split=part@test").splits) == {"test"}
    for bad in ("image=a,label=z", "image=", "colour=a", "image=a,image=b"):
        with pytest.raises(DataError):
            open_collection(f"{path}:{bad}")


def test_columns_of_a_parquet_file_can_be_chosen(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    write(tmp_path, "")
    data = (tmp_path / "1.jpg").read_bytes()
    pq.write_table(pa.table({"photo": [data] * 2, "kind": ["cat", "dog"], "label": [1, 0]}), tmp_path / "x.parquet")
    assert open_collection(f"{tmp_path / 'x.parquet'}:label=kind").classes == ("cat", "dog")
