"""The original files of the data sets: where each comes from, how long it is and what its checksum is.

Only a table: importing it loads no numpy. The checksums are those that torchvision (md5) and TensorFlow Datasets
(sha256) check, or that several public readers agree on. Where none is known there is none.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True, slots=True)
class File:
    """A file, where it goes below the set's folder, and how to know it."""

    path: str
    url: str | None  # None where no program may or can fetch it
    size: int | None = None
    md5: str | None = None
    sha256: str | None = None
    optional: bool = False
    note: str = ""

    @property
    def checksum(self) -> str:
        """As a person would write it; empty where none is known."""
        return f"sha256 {self.sha256}" if self.sha256 else f"md5 {self.md5}" if self.md5 else ""


def series(base: str, *rows: tuple[str, int | None, str | None, str | None]) -> tuple[File, ...]:
    """Files that lie at one address: (name, bytes, md5, sha256)."""
    return tuple(File(path=row[0], url=base + row[0], size=row[1], md5=row[2], sha256=row[3]) for row in rows)


TORONTO: Final = "https://www.cs.toronto.edu/~kriz/"
OXFORD: Final = "https://www.robots.ox.ac.uk/~vgg/data/"
NORB: Final = "https://cs.nyu.edu/~ylclab/data/norb-v1.0-small/"

CIFAR10: Final = series(
    TORONTO,
    ("cifar-10-python.tar.gz", 170498071, "c58f30108f718f92721af3b95e74349a", None),
)
CIFAR100: Final = series(
    TORONTO,
    ("cifar-100-python.tar.gz", 169001437, "eb9058c3a382ffc7106e4002c42a8d85", None),
)
MNIST: Final = series(
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    (
        "train-images-idx3-ubyte.gz",
        9912422,
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    ),
    (
        "train-labels-idx1-ubyte.gz",
        28881,
        "d53e105ee54ea40749a09fcbcd1e9432",
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    ),
    (
        "t10k-images-idx3-ubyte.gz",
        1648877,
        "9fb629c4189551a2d022fa330f9573f3",
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    ),
    (
        "t10k-labels-idx1-ubyte.gz",
        4542,
        "ec29112dd5afa0611ce80d1b7f02629c",
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    ),
)
FASHION: Final = series(
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    (
        "train-images-idx3-ubyte.gz",
        26421880,
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    ),
    (
        "train-labels-idx1-ubyte.gz",
        29515,
        "25c81989df183df01b3e8a0aad5dffbe",
        "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    ),
    (
        "t10k-images-idx3-ubyte.gz",
        4422102,
        "bef4ecab320f06d8554ea6380940ec79",
        "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    ),
    (
        "t10k-labels-idx1-ubyte.gz",
        5148,
        "bb300cfdad3c16e7a12a480ee83cd310",
        "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    ),
)
PETS: Final = series(
    f"{OXFORD}pets/data/",
    (
        "images.tar.gz",
        791918971,
        "5c4f3ee8e5d25df40f4fd59a7f44e54c",
        "67195c5e1c01f1ab5f9b6a5d22b8c27a580d896ece458917e61d459337fa318d",
    ),
    (
        "annotations.tar.gz",
        19173078,
        "95a8c909bbe2e81eed6a22bccdf3f68f",
        "52425fb6de5c424942b7626b428656fcbd798db970a937df61750c0f1d358e91",
    ),
)
FLOWERS: Final = series(
    f"{OXFORD}flowers/102/",
    (
        "102flowers.tgz",
        344862509,
        "52808999861908f626f3c1f4e79d11fa",
        "2d01ecc807db462958cfe3d92f57a8c252b4abd240eb955770201e45f783b246",
    ),
    (
        "imagelabels.mat",
        502,
        "e0620be6f572b9609742df49c70aed4d",
        "4903e94206bac23bf772aadf06451916df56b58fc483a62db32a97b82656651d",
    ),
    (
        "setid.mat",
        14989,
        "a5357ecc9cb78c4bef273ce3793fc85c",
        "46b8678f91fd95d3c8f4feab80d271a6c834a1dd896fe29fd3e6ad9ce5c8dccd",
    ),
)
CALTECH: Final = series(
    "https://data.caltech.edu/records/mzrjq-6wc02/files/",
    ("caltech-101.zip", None, "3138e1922a9193bfa496528edbbc45d0", None),
)
DTD: Final = series(
    f"{OXFORD}dtd/download/",
    (
        "dtd-r1.0.1.tar.gz",
        625239812,
        "fff73e5086ae6bdbea199a49dfb8a4c1",
        "e42855a52a4950a3b59612834602aa253914755c95b0cff9ead6d07395f8e205",
    ),
)
SVHN: Final = series(
    "http://ufldl.stanford.edu/housenumbers/",
    (
        "train_32x32.mat",
        182040794,
        "e26dedcc434d2e4c54c9b2d4a06d8373",
        "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
    ),
    (
        "test_32x32.mat",
        64275384,
        "eb5a983be6a315427106f1b164d9cef3",
        "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
    ),
)
SUN: Final = (
    *series(
        "http://vision.princeton.edu/projects/2010/SUN/",
        (
            "SUN397.tar.gz",
            39077296924,
            "8ca2778205c41d23104230ba66911c7a",
            "f404130965a7ad77bed5ececc71e720ab50f3cc1e1bb257257610d38f3b928ec",
        ),
    ),
    *(
        File(
            path=f"sun397_tfds_{part}.txt",
            url=None,
            optional=True,
            note="VTAB's own list; comes with tensorflow_datasets, in datasets/sun397",
        )
        for part in ("tr", "va", "te")
    ),
)
PCAM: Final = series(
    "https://zenodo.org/record/2546921/files/",
    (
        "camelyonpatch_level_2_split_train_x.h5.gz",
        6421353462,
        "1571f514728f59376b705fc836ff4b63",
        "d619e741468a7ab35c7e4a75e6821b7e7e6c9411705d45708f2a0efc8960656c",
    ),
    (
        "camelyonpatch_level_2_split_train_y.h5.gz",
        21378,
        "35c2d7259d906cfc8143347bb8e05be7",
        "b74126d2c01b20d3661f9b46765d29cf4e4fba6faba29c8e0d09d406331ab75a",
    ),
    (
        "camelyonpatch_level_2_split_valid_x.h5.gz",
        805965320,
        "d5b63470df7cfa627aeec8b9dc0c066e",
        "f82ee1670d027b4ec388048d9eabc2186b77c009655dae76d624c0ecb053ccb2",
    ),
    (
        "camelyonpatch_level_2_split_valid_y.h5.gz",
        3038,
        "2b85f58b927af9964a4c15b8f7e8f179",
        "ce1ae30f08feb468447971cfd0472e7becd0ad96d877c64120c72571439ae48c",
    ),
    (
        "camelyonpatch_level_2_split_test_x.h5.gz",
        800875929,
        "d8c2d60d490dbd479f8199bdfa0cf6ec",
        "79174c2201ad521602a5888be8f36ee10875f37403dd3f2086caf2182ef87245",
    ),
    (
        "camelyonpatch_level_2_split_test_y.h5.gz",
        3040,
        "60a7035772fbdb7f34eb86d4420cf66a",
        "0a522005fccc8bbd04c5a117bfaf81d8da2676f03a29d7499f71d0a0bd6068ef",
    ),
)
EUROSAT: Final = (
    File(
        path="EuroSAT.zip",
        md5="c8fa014336c82ac7804f0398fcb19387",
        size=94280567,
        sha256="8ebea626349354c5328b142b96d0430e647051f26efc2dc974c843f25ecf70bd",
        url="https://huggingface.co/datasets/torchgeo/eurosat/resolve/c877bcd43f099cd0196738f714544e355477f3fd/"
        "EuroSAT.zip",
    ),
)
CLEVR: Final = series(
    "https://dl.fbaipublicfiles.com/clevr/",
    (
        "CLEVR_v1.0.zip",
        19021600724,
        "b11922020e72d0cd9154779b2d3d07d2",
        "5cd61cf1096ed20944df93c9adb31e74d189b8459a94f54ba00090e5c59936d1",
    ),
)
KITTI: Final = series(
    "https://s3.eu-central-1.amazonaws.com/avg-kitti/",
    ("data_object_image_2.zip", 12569945557, None, "351c5a2aa0cd9238b50174a3a62b846bc5855da256b82a196431d60ff8d43617"),
    ("data_object_label_2.zip", 5601213, None, "4efc76220d867e1c31bb980bbf8cbc02599f02a9cb4350effa98dbb04aaed880"),
    ("devkit_object.zip", 63778, None, "cfde67e531832618ea0fd4844f91e34a45068025e2bef79e278cb812dc2537d0"),
)
IMAGENET: Final = (
    File(
        path="ILSVRC2012_img_train.tar",
        url=None,
        size=147897477120,
        md5="1d675b47d978889d74fa0da5fadfb00e",
        sha256="b08200a27a8e34218a0e58fde36b0fe8f73bc377f4acea2d91602057c3ca45bb",
        note="or class folders in train/",
    ),
    File(
        path="ILSVRC2012_img_val.tar",
        url=None,
        size=6744924160,
        md5="29b22e2961454d5413ddabcf34fc5622",
        sha256="c7e06a6c0baccf06d8dbeb6577d71efff84673a5dbdd50633ab44f8ea0456ae0",
        note="or class folders in val/",
    ),
    File(
        path="ILSVRC2012_devkit_t12.tar.gz",
        url=None,
        md5="fa75699e90414af021442c21a62c3abf",
        note="says the classes of val; not needed with class folders",
    ),
    File(
        path="real.json",
        size=388478,
        optional=True,
        url="https://raw.githubusercontent.com/google-research/reassessed-imagenet/master/real.json",
        sha256="d83e9bff374c631aae8439eb064c7019acc56e1b3bc3f56b8380c2a710b0220b",
        note="ReaL labels of val",
    ),
)
IMAGENET21K: Final = (
    File(path="n00004475.tar", url=None, note="and so on, a tar file a class"),
    File(
        path="imagenet21k_wordnet_ids.txt",
        optional=True,
        note="the order of the 21,843 classes",
        url="https://storage.googleapis.com/bit_models/imagenet21k_wordnet_ids.txt",
    ),
    File(path="multilabel.json", url=None, optional=True, note="further classes of images, if you have them"),
)
RESISC45: Final = (
    File(
        path="NWPU-RESISC45.rar",
        url=None,
        md5="d824acb73957502b00efd559fc6cfbbb",
        note="to be unpacked by hand: class folders in NWPU-RESISC45/; a .zip of them will do as well",
    ),
)
DSPRITES: Final = series(
    "https://github.com/google-deepmind/dsprites-dataset/raw/master/",
    ("dsprites_ndarray_co1sh3sc6or40x32y32_64x64.npz", None, "7da33b31b13a06f4b04a70402ce90c2e", None),
)
SMALLNORB: Final = series(
    NORB,
    (
        "smallnorb-5x46789x9x18x6x2x96x96-training-dat.mat.gz",
        131896188,
        None,
        "5ffd6272a07d32695ee1082a26a41a93a37aab8c28da047f8c34ed348d214873",
    ),
    (
        "smallnorb-5x46789x9x18x6x2x96x96-training-cat.mat.gz",
        348,
        None,
        "2784e542c1922060691090952b6cd6278879a216c90f81476f0f00256d42cdaa",
    ),
    (
        "smallnorb-5x46789x9x18x6x2x96x96-training-info.mat.gz",
        71052,
        None,
        "de7eb932ebe7a4ee16217fead60660d0eb3d23632c2f4d1c51f88c501c17bf32",
    ),
    (
        "smallnorb-5x01235x9x18x6x2x96x96-testing-dat.mat.gz",
        130799817,
        None,
        "cf7104eed3e51174d2f65b66d1e5878b9da233b886f161b0d88f4510ba2c7474",
    ),
    (
        "smallnorb-5x01235x9x18x6x2x96x96-testing-cat.mat.gz",
        347,
        None,
        "ecaf6d5bb8c3bc5eab9cf0258f6d2198dd474e016e374836fc097f2e5ff509ff",
    ),
    (
        "smallnorb-5x01235x9x18x6x2x96x96-testing-info.mat.gz",
        10428,
        None,
        "16adf314226327ee006d1a44db8cfef52773c06c829951d5653a9f6f310248a2",
    ),
)
RETINOPATHY: Final = (
    File(path="trainLabels.csv", url=None, note="from trainLabels.csv.zip"),
    File(path="train", url=None, note="the .jpeg files of train.zip.001 to .005"),
    File(path="test", url=None, note="the .jpeg files of test.zip.001 to .007"),
    File(
        path="retinopathy_solution.csv",
        size=1181257,
        url="https://storage.googleapis.com/kaggle-forum-message-attachments/90528/2877/retinopathy_solution.csv",
        sha256="a6af3d66804e81887da89b9261bcfb7da4f5bacedb070f1b5db83fa879ab60c9",
    ),
)
DMLAB: Final = series(
    "https://storage.googleapis.com/dmlab-vtab/",
    ("dmlab.tar.gz", 3017022789, None, "638b18fa69a5d61bbc310cd0b87ac603a39f41de0fdb07b6e77de274a24480a4"),
)
